// ex2.approx.ftz, and the exponential of the sm90 contract: exp(x) = ex2(x * log2 e), the product rounded to fp32
// (docs/contract.md, "On Hopper GPUs"). Changing either function changes bits and the contract id.
// In CPU tests tests/ops/cuda_on_cpu/ptx/exponential.cuh stands in for this file: names and signatures must match.
#pragma once

namespace alignkit {

// 2^x; denormal inputs and results are flushed to zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// exp(x) of the contract.
__device__ __forceinline__ float exponential(float x) {
  constexpr float log2e = 1.4426950408889634f;
  return exp2_approx(x * log2e);
}

}  // namespace alignkit
