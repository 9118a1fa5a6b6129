// ex2: the exponential of the contract, 2^(x log2 e) by the hardware.
#pragma once

namespace alignkit {

__device__ __forceinline__ float exponential(float x) {
  constexpr float log2e = 1.4426950408889634f;
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * log2e));
  return y;
}

}  // namespace alignkit
