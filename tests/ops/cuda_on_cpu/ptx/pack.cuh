// Stand-in for csrc/sm90/ptx/pack.cuh.
#pragma once
#include "../machine.h"
namespace alignkit {
template <class T>
uint32_t pack(float a, float b) {
  T low, high;
  low = a, high = b;
  return low.bits | uint32_t{high.bits} << 16;
}
template <class T>
float2 unpack(uint32_t pair) {
  return {bf16(pair), bf16(pair >> 16)};
}
}  // namespace alignkit
