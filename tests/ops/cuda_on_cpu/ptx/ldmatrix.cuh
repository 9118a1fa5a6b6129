#pragma once
#include "shared_address.cuh"
namespace alignkit {
template <bool kTransposed>
void load_matrices(uint32_t (&m)[4], uint32_t row) {
  static_assert(!kTransposed);
  auto& given = machine::given[machine::warp()];
  int lane = machine::lane();
  given[lane][0] = row;
  machine::meet();
  for (int i = 0; i < 4; ++i)
    std::memcpy(&m[i], machine::shared + given[i * 8 + lane / 4][0] + lane % 4 * 4, 4);
  machine::meet();
}
}  // namespace alignkit
