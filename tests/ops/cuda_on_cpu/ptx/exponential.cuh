#pragma once
#include "../machine.h"
namespace alignkit {
inline float power_of_2(float x) {
  float y = std::exp2f(x);
  return std::fabs(y) < 0x1p-126f ? 0.0f : y;
}
}  // namespace alignkit
