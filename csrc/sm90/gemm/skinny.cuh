// Common parts of the skinny GEMMs (small m) in skinny_wide.cu and skinny_split_k.cu. The operands are swapped:
// rows of the weight b are wgmma's M, 128 per CTA, and rows of a are its N. Widths and depths change no bits.
// The entry points reject unsupported widths.
#pragma once
#include "gemm.cuh"

namespace alignkit {
namespace {

constexpr int kOutputs = 128;  // schedule: outputs (of n) per CTA, fixed: two consumer warpgroups of 64

// One pipeline stage; kWidth: rows of a per CTA.
template <int kWidth>
struct WideStage {
  __nv_bfloat16 b[kOutputs * kStep];
  __nv_bfloat16 a[kWidth * kStep];
};

template <int kWidth>
struct WideShared {
  static constexpr int kDepth = 220 * 1024 / sizeof(WideStage<kWidth>);  // schedule: stages that fit in shared memory
  WideStage<kWidth> stage[kDepth];
  uint64_t full[kDepth], empty[kDepth];
};

}  // namespace
}  // namespace alignkit
