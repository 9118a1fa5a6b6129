// 32-bit shared-memory addresses for PTX instructions.
// In CPU tests tests/ops/cuda_on_cpu/ptx/shared_address.cuh stands in for this file: names and signatures must match.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace alignkit {

// The shared-window address of a generic pointer to shared memory.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

}  // namespace alignkit
