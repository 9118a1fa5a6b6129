// What kernels of the forward pass share: blocks and leaves of keys, what scores are measured by, and how leaves meet.
#pragma once
#include <cstdint>

#include "../ptx/exponential.cuh"
#include "../ptx/pack.cuh"

namespace alignkit {
namespace {

constexpr int kKeys = 128;      // of a block
constexpr int kLeafKeys = 512;  // of a leaf
// A probability is 2^-31 where a score is what scores are measured by: the leaf's first, and where a rounded one would be 2
// or more, as the uppermost bit of its exponent says, the greatest of that block.
constexpr float kReserve = 31;
constexpr uint32_t kTooGreat = 0x40004000;  // of two rounded ones
constexpr float kInfinity = __builtin_huge_valf();

// Whether a probability is.
__device__ __forceinline__ bool too_great(float power) {
  return (pack<__nv_bfloat16>(power, 0.0f) & kTooGreat) != 0;
}

// What is added to scores of the leaves before and of the next one together, from what is added to those of each; `before`
// and `after` are what multiplies the sums of each.
__device__ __forceinline__ float meet(float of_those, float of_next, float& before, float& after) {
  float to = of_those - of_next <= kReserve ? of_those : of_next;
  before = power_of_2(to - of_those);
  after = power_of_2(to - of_next);
  return to;
}

}  // namespace
}  // namespace alignkit
