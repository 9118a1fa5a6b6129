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

// An operand of products that the compiler does not compute others from ahead, for which there are no registers.
__device__ __forceinline__ uint64_t again(uint64_t operand) {
  auto low = static_cast<uint32_t>(operand);
  asm volatile("" : "+r"(low));
  return operand >> 32 << 32 | low;
}

}  // namespace alignkit
