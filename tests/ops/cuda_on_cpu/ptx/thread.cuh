#pragma once
#include "../machine.h"
namespace alignkit {
inline uint32_t thread_again() { return threadIdx.x; }
}  // namespace alignkit
