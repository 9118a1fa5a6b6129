// ex2 and rcp: powers of 2 and reciprocals by the hardware, and the exponential of the contract, 2^(x log2 e).
#pragma once

namespace alignkit {

__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Off by at most the last bit.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float exponential(float x) {
  constexpr float log2e = 1.4426950408889634f;
  return power_of_2(x * log2e);
}

}  // namespace alignkit
