// %tid: the thread's number, read again wherever it is asked for, where no register is to keep it.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace alignkit {

__device__ __forceinline__ uint32_t thread_again() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

}  // namespace alignkit
