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
inline uint32_t transposed(uint32_t m) {
  auto& given = machine::given[machine::warp()];
  int lane = machine::lane(), row = lane / 4, column = lane % 4 * 2;
  given[lane][0] = m;
  machine::meet();
  auto at = [&](int r, int c) { return static_cast<uint32_t>(given[4 * r + c / 2][0] >> c % 2 * 16 & 0xffff); };
  uint32_t to = at(column, row) | at(column + 1, row) << 16;
  machine::meet();
  return to;
}
}  // namespace alignkit
