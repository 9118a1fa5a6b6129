// Values that the compiler must not keep in registers or precompute, for kernels short of registers.
// In CPU tests tests/ops/cuda_on_cpu/ptx/thread.cuh stands in for this file: names and signatures must match.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace alignkit {

// Read %tid.x from the special register at each call.
__device__ __forceinline__ uint32_t read_tid_x() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// Return a wgmma descriptor as a value the compiler cannot trace, so that it does not precompute descriptors derived
// from it.
__device__ __forceinline__ uint64_t opaque(uint64_t descriptor) {
  auto low = static_cast<uint32_t>(descriptor);
  asm volatile("" : "+r"(low));
  return descriptor >> 32 << 32 | low;
}

}  // namespace alignkit
