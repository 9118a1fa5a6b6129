// Stand-in for csrc/sm90/ptx/exponential.cuh: libm's exp2f, denormal results flushed to zero.
// `ex2` of test_attention_on_cpu.py computes the same. `exponential` is left out.
#pragma once
#include "../machine.h"
namespace alignkit {
inline float exp2_approx(float x) {
  float y = std::exp2f(x);
  return std::fabs(y) < 0x1p-126f ? 0.0f : y;
}
}  // namespace alignkit
