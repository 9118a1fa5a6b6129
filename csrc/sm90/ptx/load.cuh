// ld: memory to registers, under a condition.
#pragma once
#include <cuda_runtime.h>

namespace alignkit {

// Four numbers of memory that other blocks of threads wrote; zeros if not `here`. By one piece of assembly, so that the zeros
// are not put where products are under way.
__device__ __forceinline__ void load_or_zero(float* to, const float4* from, bool here) {
  asm volatile(
      "{\n"
      ".reg .pred here;\n"
      "setp.ne.b32 here, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@here ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&f"(to[0]), "=&f"(to[1]), "=&f"(to[2]), "=&f"(to[3])
      : "l"(from), "r"(static_cast<int>(here))
      : "memory");
}

}  // namespace alignkit
