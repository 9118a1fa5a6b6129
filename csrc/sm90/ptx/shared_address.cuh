// Addresses of shared memory, as instructions take them.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace alignkit {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

}  // namespace alignkit
