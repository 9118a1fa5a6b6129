// Stand-in for csrc/sm90/ptx/pack.cuh, bf16 only. operator= of __nv_bfloat16 in machine.h rounds.
#pragma once
#include <type_traits>

#include "../machine.h"
namespace alignkit {
template <class T>
uint32_t pack(float a, float b) {
  static_assert(std::is_same_v<T, __nv_bfloat16>);
  T low, high;
  low = a, high = b;
  return low.bits | uint32_t{high.bits} << 16;
}
template <class T>
float2 unpack(uint32_t pair) {
  static_assert(std::is_same_v<T, __nv_bfloat16>);
  return {bf16(pair), bf16(pair >> 16)};
}
}  // namespace alignkit
