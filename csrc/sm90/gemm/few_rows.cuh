// What products of few rows have in common where the weight is wide: rows of b are rows to the tensor core, 128 to a block, and
// the rows of a are its columns.
#pragma once
#include "gemm.cuh"

namespace alignkit {
namespace {

constexpr int kIds = 128;  // of n, of a block

// kWidth: rows of a.
template <int kWidth>
struct WideStage {
  __nv_bfloat16 b[kIds * kStep];
  __nv_bfloat16 a[kWidth * kStep];
};

template <int kWidth>
struct WideShared {
  static constexpr int kDepth = 220 * 1024 / sizeof(WideStage<kWidth>);
  WideStage<kWidth> stage[kDepth];
  uint64_t full[kDepth], empty[kDepth];
};

}  // namespace
}  // namespace alignkit
