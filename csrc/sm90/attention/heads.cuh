// What the kernels of attention share: rows of heads in memory, how they are brought and stored, and where a sequence's
// statistics are.
#pragma once
#include "../ptx/copy.cuh"
#include "../ptx/pack.cuh"
#include "../ptx/thread.cuh"

// Numbers of 32 bits, or of 64.
struct AlignkitInts {
  const void* data;
  int wide;
};

// Rows of bf16: elements from a token to the next, and from a head to the next.
struct AlignkitHeads {
  const void* data;
  int64_t token, head;
};

namespace alignkit {
namespace {

constexpr int kHalf = 64;         // elements of a head that lie beside each other in shared memory
// Of the last one there may be a part, which zeros follow.
template <int kDim>
constexpr int kHalves = (kDim + kHalf - 1) / kHalf;

// Whether, of a block of groups of four warps, one may have `few` registers for each thread and the others `many`: there are as
// many as the block began with. Those who ask for more wait forever.
template <int kFew, int kMany, int kOthers>
constexpr bool kRegistersSuffice = kFew + kOthers * kMany <= (kOthers + 1) * (65536 / ((kOthers + 1) * 128) / 8 * 8);

constexpr int kStatistics = 128;  // a sequence's begin at a multiple

__device__ __forceinline__ int64_t at(const AlignkitInts& ints, int64_t i) {
  return ints.wide ? static_cast<const int64_t*>(ints.data)[i] : static_cast<const int32_t*>(ints.data)[i];
}

// The rows of sequence s, in [0, tokens) whatever `starts` holds.
__device__ __forceinline__ void rows_of(const AlignkitInts& starts, int s, int tokens, int& begin, int& count) {
  begin = static_cast<int>(min(max(at(starts, s), int64_t{0}), int64_t{tokens}));
  count = static_cast<int>(min(max(at(starts, s + 1), int64_t{begin}), int64_t{tokens})) - begin;
}

// The row h of a thread, rounded, to `out`. Four lanes hold two neighbours each of eight columns; they trade until each
// has all eight of its own, 16 bytes.
template <int kCount, int kSize>
__device__ __forceinline__ void store_row(const float (&x)[kSize], int h, __nv_bfloat16* out, bool here) {
  int lane = thread_again() % 32;
  bool odd = lane & 1, high = lane & 2;
#pragma unroll
  for (int i = 0; i < kCount / 16; ++i) {
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = pack<__nv_bfloat16>(x[16 * i + 4 * j + 2 * h], x[16 * i + 4 * j + 2 * h + 1]);
    uint32_t a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
    (odd ? w[0] : w[1]) = a;
    (odd ? w[2] : w[3]) = b;
    a = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2), b = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
    (high ? w[0] : w[2]) = a;
    (high ? w[1] : w[3]) = b;
    if (here) *reinterpret_cast<uint4*>(out + 32 * i + lane % 4 * 8) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

// Host.

// Rows that lie in one page: so many that a page, and a block of keys, is of whole parts.
inline int part_rows_of(int page, int block) {
  while (page % block) block /= 2;
  return block;
}

// Of rows of heads, half a head of `box_heads` heads of `box_rows` rows at a time. The fourth dimension is 1: there is
// a copy of four.
inline cudaError_t map_of(CUtensorMap* map, const AlignkitHeads& rows, int64_t tokens, int heads, int dim,
                          int box_heads, int box_rows) {
  if (!encode()) return cudaErrorNotSupported;
  cuuint64_t size[4] = {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(heads),
                        static_cast<cuuint64_t>(tokens), 1};
  cuuint64_t stride[3] = {static_cast<cuuint64_t>(rows.head) * 2, static_cast<cuuint64_t>(rows.token) * 2,
                          static_cast<cuuint64_t>(rows.token) * 2};
  cuuint32_t box[4] = {kHalf, static_cast<cuuint32_t>(box_heads), static_cast<cuuint32_t>(box_rows), 1};
  cuuint32_t one[4] = {1, 1, 1, 1};
  CUresult made = encode()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(rows.data), size, stride, box,
                           one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace
}  // namespace alignkit
