#pragma once
#include "shared_address.cuh"
namespace alignkit {
template <bool kTransposed>
void load_matrices(uint32_t (&m)[4], uint32_t row) {
  auto& given = machine::given[machine::warp()];
  int lane = machine::lane();
  if (row % 16) machine::fail("a row of a matrix is not at a multiple of 16 bytes");
  given[lane][0] = row;
  machine::meet();
  for (int i = 0; i < 4; ++i)
    for (int e = 0; e < 2; ++e) {
      int of = kTransposed ? lane % 4 * 2 + e : lane / 4, column = kTransposed ? lane / 4 : lane % 4 * 2 + e;
      std::memcpy(reinterpret_cast<uint8_t*>(&m[i]) + e * 2, machine::shared + given[i * 8 + of][0] + column * 2, 2);
    }
  machine::meet();
}
}  // namespace alignkit
