#pragma once
#include "../machine.h"

namespace alignkit {

// As `compute` in wgmma.cuh: 16 exact products, added in double, rounded once.
inline void multiply_16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  auto& given = machine::given[machine::warp()];
  int lane = machine::lane();
  for (int i = 0; i < 4; ++i) given[lane][i] = a[i] | uint64_t{i < 2 ? (i ? b1 : b0) : 0} << 32;
  machine::meet();
  auto half = [](uint64_t pair, int k) { return bf16(static_cast<uint16_t>(k % 2 ? pair >> 16 : pair)); };
  for (int h = 0; h < 2; ++h)
    for (int e = 0; e < 2; ++e) {
      double sum = d[2 * h + e];
      for (int k = 0; k < 16; ++k) {
        float left = half(given[lane / 4 * 4 + k / 2 % 4][h + k / 8 * 2], k);
        float right = half(given[(2 * (lane % 4) + e) * 4 + k / 2 % 4][k / 8] >> 32, k);
        sum += double{left} * right;
      }
      d[2 * h + e] = static_cast<float>(sum);
    }
  machine::meet();
}

}  // namespace alignkit
