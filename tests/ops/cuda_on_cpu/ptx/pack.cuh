#pragma once
#include "../machine.h"
namespace alignkit {
inline uint32_t rounded(float v) {
  uint32_t bits = __float_as_uint(v);
  return std::isnan(v) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <class T>
uint32_t pack(float a, float b) {
  return rounded(a) | rounded(b) << 16;
}
}  // namespace alignkit
