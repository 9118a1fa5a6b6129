// What csrc/sm90/gemm needs besides ptx/, of clusters of one block.
#pragma once
#include "machine.h"
#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"
#include "ptx/wgmma.cuh"

#define __cluster_dims__(...)

struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  __nv_bfloat162 pair;
  pair.x = a, pair.y = b;
  return pair;
}
inline float __bfloat162float(__nv_bfloat16 v) { return bf16(v.bits); }

struct cudaLaunchConfig_t {
  int dynamicSmemBytes;
};
template <class F>
int cudaOccupancyMaxActiveClusters(int* clusters, F, cudaLaunchConfig_t*) {
  *clusters = machine::processors / 2;
  return 0;
}

namespace alignkit {

inline int cluster_rank() { return 0; }
inline void cluster_sync() { __syncthreads(); }
inline void barrier_arrive(uint64_t*, int) { machine::fail("there is no other block"); }
inline void copy_box_to(int, void*, const CUtensorMap*, int, int, uint64_t*) { machine::fail("there is no other block"); }
inline void copy_box_to(int, void*, const CUtensorMap*, int, int, int, uint64_t*) {
  machine::fail("there is no other block");
}

// Matrices and tensors of three dimensions are those of four whose others have one element.
inline void copy_box(void* to, const CUtensorMap* map, int x, int y, uint64_t* b) { copy_box(to, map, x, y, 0, 0, b); }
inline void copy_box(void* to, const CUtensorMap* map, int x, int y, int z, uint64_t* b) {
  copy_box(to, map, x, y, z, 0, b);
}
inline CUresult encode_fewer(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t dimensions, void* data,
                             const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                             const cuuint32_t* one, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                             CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  cuuint64_t sizes[4] = {1, 1, 1, 1}, strides[3] = {16, 16, 16};
  cuuint32_t boxes[4] = {1, 1, 1, 1};
  std::copy(size, size + dimensions, sizes);
  std::copy(stride, stride + dimensions - 1, strides);
  std::copy(box, box + dimensions, boxes);
  return encode_map(map, type, 4, data, sizes, strides, boxes, one, interleave, swizzle, promotion, fill);
}
inline auto encode_of_products() { return &encode_fewer; }
#define encode encode_of_products

template <bool kATransposed, bool kBTransposed, int kCount>
void begin(float (&d)[kCount], uint64_t a, uint64_t b) {
  multiply<kATransposed, kBTransposed>(d, a, b, false);
}

}  // namespace alignkit
