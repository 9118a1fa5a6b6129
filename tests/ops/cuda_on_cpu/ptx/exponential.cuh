#pragma once
#include "../machine.h"
namespace alignkit {
inline float power_of_2(float x) {
  float y = std::exp2f(x);
  return std::fabs(y) < 0x1p-126f ? 0.0f : y;
}
inline float reciprocal(float x) { return 1.0f / x; }
inline float exponential(float x) { return power_of_2(x * 1.4426950408889634f); }
}  // namespace alignkit
