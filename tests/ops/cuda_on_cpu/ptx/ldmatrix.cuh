// Stand-in for csrc/sm90/ptx/ldmatrix.cuh, without transposed loads and stmatrix.
#pragma once
#include "shared_address.cuh"
namespace alignkit {
template <bool kTransposed>
void ldmatrix_x4(uint32_t (&m)[4], uint32_t row_address) {
  static_assert(!kTransposed);
  auto& exchange = machine::exchange[machine::warp()];
  int lane = machine::lane();
  exchange[lane][0] = row_address;
  machine::sync_warp();
  for (int i = 0; i < 4; ++i)
    std::memcpy(&m[i], machine::shared + exchange[i * 8 + lane / 4][0] + lane % 4 * 4, 4);
  machine::sync_warp();
}
}  // namespace alignkit
