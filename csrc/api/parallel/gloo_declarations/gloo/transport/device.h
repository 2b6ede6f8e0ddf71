// SPDX-License-Identifier: BSD-3-Clause
// See Note [Gloo without its headers].
#pragma once

namespace gloo::transport {

class Device;
// Must be complete, because inline destructors in torch's classes delete an UnboundBuffer.
class UnboundBuffer {};

}  // namespace gloo::transport
