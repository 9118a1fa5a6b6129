// Constants that the kernels share with Python: csrc includes this file, and alignkit/runtime/shared.py reads it. A
// value is a number or `number << number`.
#pragma once

namespace alignkit {

// hardware: k per pipeline stage of a GEMM, a row of 128 bytes, the largest TMA swizzle.
constexpr int kStep = 64;
// schedule: limit of the unsplit k-tree (gemm/skinny_split_k.cu:quarter_gemm), in rows of a.
constexpr int kQuarterWidth = 64;
// schedule: limit of the grouped GEMMs, whose shared memory has a table of experts; a power of two.
constexpr int kMaxExperts = 1024;
// schedule: limit of experts/combine.cu: a row's pairs are held in registers.
constexpr int kMaxTopK = 16;
// schedule: ids per CTA of experts/pairs.cu, a multiple of its threads.
constexpr int kIdsPerCta = 2048;
// schedule: limit of the index arithmetic of rms_norm.cu and of its kDweightLevels.
constexpr int kNormMaxRows = 1 << 27;
// schedule: limit of rms_norm.cu, in which a CTA holds a row in registers.
constexpr int kNormMaxColumns = 1 << 14;
// schedule: a sequence's statistics of attention start at a multiple of this number and are padded to one, so that
// blocks are read whole. A multiple of attention/backward.cuh:kBlock.
constexpr int kStatisticsPad = 128;
// schedule: bytes per CTA for merged accumulators of attention in global memory, for head dimension 256.
constexpr int kSpillBytes256 = 102400;
// schedule: limit of rank_sum/all_reduce.cu, in CTAs. CTAs spin, so other kernels need free SMs.
constexpr int kSumMaxBlocks = 64;
// schedule: bytes for signals at the start of a rank's memory, before its values.
constexpr int kSumHeadBytes = 16384;
// schedule: values that a buffer of one-barrier sums holds.
constexpr int kSumMaxOneBarrier = 1 << 19;
// Form of a sum over ranks: one-shot all-reduce, in which every rank adds everything; reduce-scatter; two-shot
// all-reduce, in which each rank adds a share and reads the others'.
enum class Form { kWhole = 0, kSlice = 1, kShared = 2 };
// Dtype of csrc/cpu.
enum DType : int { F32 = 0, BF16 = 1, F16 = 2 };

}  // namespace alignkit
