// What products by k-trees have in common. To the copy engine k is two dimensions, leaves and what is in them: a leaf whose length is
// no multiple of 64 ends in zeros.
#pragma once
#include "gemm.cuh"

namespace alignkit {
namespace {

// Of each warp that multiplies, one arrival in the blocks that copy to a stage, this one or both of the cluster.
template <int kCopying>
__device__ __forceinline__ void hand_back(uint64_t* empty) {
  if (kCopying == 1) {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty);
  } else if (threadIdx.x % 32 < kCopying) {
    barrier_arrive(empty, threadIdx.x % 32);
  }
}

// Of a matrix [rows, k]: `box_rows` rows by 64 of a leaf at a time.
inline cudaError_t map_of_leaves(CUtensorMap* map, const Matrix& matrix, int rows, int k, int leaves, int box_rows) {
  if (!encode()) return cudaErrorNotSupported;
  cuuint64_t leaf = k / leaves;
  cuuint64_t size[3] = {leaf, static_cast<cuuint64_t>(leaves), static_cast<cuuint64_t>(rows)};
  cuuint64_t stride[2] = {leaf * 2, static_cast<cuuint64_t>(matrix.pitch) * 2};
  cuuint32_t box[3] = {kStep, 1, static_cast<cuuint32_t>(box_rows)}, one[3] = {1, 1, 1};
  CUresult made = encode()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(matrix.data), size, stride, box,
                           one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

inline int steps_of(int k, int leaves) { return (k / leaves + kStep - 1) / kStep; }

}  // namespace
}  // namespace alignkit
