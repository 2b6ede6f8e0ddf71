// SPDX-License-Identifier: BSD-3-Clause
// See Note [Gloo without its headers].
#pragma once

namespace gloo::transport {

class Device;
// Defined, because the destructors of torch's classes that own one are inline.
class UnboundBuffer {};

}  // namespace gloo::transport
