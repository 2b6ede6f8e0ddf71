// SPDX-License-Identifier: BSD-3-Clause
// See Note [Gloo without its headers].
#pragma once
