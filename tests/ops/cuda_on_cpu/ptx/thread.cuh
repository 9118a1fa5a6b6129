// Stand-in for csrc/sm90/ptx/thread.cuh: plain values, which the compiler may keep or precompute.
#pragma once
#include "../machine.h"
namespace alignkit {
inline uint32_t read_tid_x() { return machine::current; }
inline uint64_t opaque(uint64_t descriptor) { return descriptor; }

}  // namespace alignkit
