// Shared by the attention kernels: argument structs, tensor maps of heads, the row store and the layout of statistics.
// The only arithmetic here is the contract's rounding of results, in store_row.
#pragma once
#include "../../interface.h"
#include "../ptx/pack.cuh"
#include "../ptx/thread.cuh"
#include "../ptx/tma.cuh"
#include "alignkit/runtime/kernels.h"

// An array of int32, or of int64 if `wide`.
struct AlignkitInts {
  const void* data;
  int wide;
};
ALIGNKIT_STRUCT(AlignkitInts, data, wide)

// A bf16 tensor [tokens, heads, dim]; `token` and `head` are strides in elements.
struct AlignkitHeads {
  const void* data;
  int64_t token, head;
};
ALIGNKIT_STRUCT(AlignkitHeads, data, token, head)

namespace alignkit {
namespace {

constexpr int kBoxColumns = 64;  // hardware: head elements per TMA box, one row of the 128-byte swizzle
// TMA boxes per head; TMA fills the columns past the head's end with zeros.
template <int kDim>
constexpr int kBoxesPerHead = (kDim + kBoxColumns - 1) / kBoxColumns;

// True if setmaxnreg can give each producer thread kProducer registers and each consumer thread kConsumer.
// Their sum must not exceed the CTA's registers at launch, or setmaxnreg.inc waits forever.
template <int kProducer, int kConsumer, int kConsumerGroups>
constexpr bool kRegistersFit =
    kProducer + kConsumerGroups * kConsumer <= (kConsumerGroups + 1) * (65536 / ((kConsumerGroups + 1) * 128) / 8 * 8);

__device__ __forceinline__ int64_t load_int(const AlignkitInts& ints, int64_t i) {
  return ints.wide ? static_cast<const int64_t*>(ints.data)[i] : static_cast<const int32_t*>(ints.data)[i];
}

// Return the first row and the row count of sequence s, clamped to [0, tokens] for any contents of `starts`.
__device__ __forceinline__ void sequence_rows(const AlignkitInts& starts, int s, int tokens, int& begin, int& count) {
  begin = static_cast<int>(min(max(load_int(starts, s), int64_t{0}), int64_t{tokens}));
  count = static_cast<int>(min(max(load_int(starts, s + 1), int64_t{begin}), int64_t{tokens})) - begin;
}

// Round a thread's row h of a wgmma accumulator and write it to `out`.
// Four lanes hold two adjacent columns each of every eight. They exchange values, so that each stores 16 bytes.
template <int kCount, int kSize>
__device__ __forceinline__ void store_row(const float (&x)[kSize], int h, __nv_bfloat16* out, bool valid) {
  int lane = read_tid_x() % 32;
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
    if (valid) *reinterpret_cast<uint4*>(out + 32 * i + lane % 4 * 8) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

// Host code.

// Return the rows of a K/V box: a power-of-two fraction of `block` that divides the page size.
inline int page_box_rows(int page, int block) {
  while (page % block) block /= 2;
  return block;
}

// Make the tensor map of [tokens, heads, dim]: a box is 64 columns of `box_heads` heads of `box_rows` rows.
// The map has a fourth dimension of size 1, for the 4-D tma_load.
inline cudaError_t make_tensor_map(CUtensorMap* map, const AlignkitHeads& rows, int64_t tokens, int heads, int dim,
                                   int box_heads, int box_rows) {
  if (!tensor_map_encoder()) return cudaErrorNotSupported;
  cuuint64_t size[4] = {static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(tokens),
                        1};
  cuuint64_t stride[3] = {static_cast<cuuint64_t>(rows.head) * 2, static_cast<cuuint64_t>(rows.token) * 2,
                          static_cast<cuuint64_t>(rows.token) * 2};
  cuuint32_t box[4] = {kBoxColumns, static_cast<cuuint32_t>(box_heads), static_cast<cuuint32_t>(box_rows), 1};
  cuuint32_t one[4] = {1, 1, 1, 1};
  CUresult status = tensor_map_encoder()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(rows.data), size,
                                         stride, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace
}  // namespace alignkit
