// Weighted sum over a token's experts, in fp32. A term is a pair's row times the router's weight; the tree over experts
// adds the terms.
//
// Tile: a warp computes one token, or some of its columns if tokens are few. Lane n takes the n-th of the token's
// experts in tree order and finds its parent: the lane to whose partial sum it adds its own. Then each lane adds 16
// bytes of columns at a time; the loads of all pairs are in flight together.
//
// Order of summation (docs/contract.md, "Mixture of experts", "Tree over experts"): ids without a pair (place -1) are
// skipped. +0 is added to every term, which gives the bits of the contract's +0 at the end.
//
// Launch: CTAs of 8 warps; grid (tokens / 8, column parts), with enough column parts for about kTargetCtas CTAs.
//
// Called by alignkit/ops/moe_experts/cuda_backend.py. Tile and launch shape change no bits.
#include <algorithm>
#include <climits>
#include <cstdint>

#include <cuda_bf16.h>

#include "../../interface.h"
#include "../ptx/pdl.cuh"
#include "alignkit/runtime/kernels.h"

namespace alignkit {
namespace {

constexpr int kWarps = 8;         // schedule: warps per CTA
constexpr int kTargetCtas = 256;  // schedule: CTAs that fill the GPU

struct Combine {
  const int64_t* place;  // pair of each id, or -1
  const void* ids;       // int64, or int32 if `narrow`
  const float* weights;  // null: all 1
  int rows, k, columns;
  int run, width;  // tree over experts: the leaf of an id is id / run * width + id % run
  bool narrow;     // ids are int32
};

template <class T>
constexpr int kVector = 16 / sizeof(T);

// Return element i of a 16-byte vector of T.
template <class T>
__device__ __forceinline__ float element(const uint4& bits, int i) {
  uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
  if (sizeof(T) == 4) return __uint_as_float(words[i]);
  return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16);
}

__device__ __forceinline__ void store_vector(float* out, const float (&v)[4]) {
  *reinterpret_cast<float4*>(out) = make_float4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ void store_vector(float* out, const float (&v)[8]) {
  reinterpret_cast<float4*>(out)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(out)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

__device__ __forceinline__ void store_vector(__nv_bfloat16* out, const float (&v)[8]) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
    w[i] = *reinterpret_cast<uint32_t*>(&pair);
  }
  *reinterpret_cast<uint4*>(out) = make_uint4(w[0], w[1], w[2], w[3]);
}

// Combine the rows of each token. kMaxIds: upper bound of the ids per token.
template <int kMaxIds, class In, class Out>
__global__ void __launch_bounds__(kWarps * 32) combine(const In* y, Out* out, const Combine p) {
  constexpr int per_vector = kVector<In>;
  constexpr int per_step = kMaxIds > 8 ? per_vector / 2 : per_vector;  // columns added per pass
  griddep_wait();
  griddep_launch_dependents();
  int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  if (row >= p.rows) return;

  int64_t pair = -1;
  int leaf = INT_MAX;  // ids without a pair sort last
  float weight = 1.0f;
  if (lane < p.k) {
    int64_t i = row * p.k + lane;
    pair = p.place[i];
    int id = p.narrow ? static_cast<const int*>(p.ids)[i] : static_cast<int>(static_cast<const int64_t*>(p.ids)[i]);
    if (pair >= 0) leaf = id / p.run * p.width + id % p.run;
    if (p.weights) weight = p.weights[i];
  }
  int position = 0, source = 0;
  for (int i = 0; i < p.k; ++i) {
    int other = __shfl_sync(~0u, leaf, i);
    position += other < leaf || (other == leaf && i < lane);
  }
  for (int i = 0; i < p.k; ++i)
    if (__shfl_sync(~0u, position, i) == lane) source = i;
  leaf = __shfl_sync(~0u, leaf, source);
  pair = __shfl_sync(~0u, pair, source);
  weight = __shfl_sync(~0u, weight, source);
  int count = __popc(__ballot_sync(~0u, lane < p.k && pair >= 0));
  // Lane n's subtree is a right child at `level`, where its leaf and the previous leaf diverge. Its parent is the first
  // lane in the left sibling's subtree.
  int level = 32 - __clz(leaf ^ __shfl_up_sync(~0u, leaf, 1)), parent_lane = -1;
  for (int i = p.k - 1; i >= 0; --i) {
    int other = __shfl_sync(~0u, leaf, i);
    if (i < lane && lane < count && other >> level == leaf >> level) parent_lane = i;
  }

  int64_t offset[kMaxIds];
  float weights[kMaxIds];
  int parent[kMaxIds];
#pragma unroll
  for (int n = 0; n < kMaxIds; ++n) {
    offset[n] = __shfl_sync(~0u, pair, n) * p.columns;
    weights[n] = __shfl_sync(~0u, weight, n);
    parent[n] = __shfl_sync(~0u, parent_lane, n);
  }
  for (int j = (blockIdx.y * 32 + lane) * per_vector; j < p.columns; j += gridDim.y * 32 * per_vector) {
    uint4 vectors[kMaxIds];
#pragma unroll
    for (int n = 0; n < kMaxIds; ++n)
      if (n < count) vectors[n] = *reinterpret_cast<const uint4*>(y + offset[n] + j);
    float sums[per_vector];
#pragma unroll
    for (int first = 0; first < per_vector; first += per_step) {
      float v[kMaxIds][per_step];
#pragma unroll
      for (int n = 0; n < kMaxIds; ++n)
#pragma unroll
        for (int i = 0; i < per_step; ++i) {
          float x = n < count ? element<In>(vectors[n], first + i) : 0.0f;
          v[n][i] = (p.weights && n < count ? weights[n] * x : x) + 0.0f;
        }
      // v[b] is complete for every b > a. Ascending b adds the children of `a` in order of their level, lowest first.
#pragma unroll
      for (int a = kMaxIds - 2; a >= 0; --a)
#pragma unroll
        for (int b = a + 1; b < kMaxIds; ++b)
          if (parent[b] == a) {
#pragma unroll
            for (int i = 0; i < per_step; ++i) v[a][i] = v[a][i] + v[b][i];
          }
#pragma unroll
      for (int i = 0; i < per_step; ++i) sums[first + i] = v[0][i];
    }
    store_vector(out + row * p.columns + j, sums);
  }
}

template <class In, class Out>
cudaError_t launch_combine(const void* y, void* out, const Combine& p, cudaStream_t stream) {
  if (p.rows < 1 || p.k < 1 || p.run < 1 || p.columns < 1 || p.columns % kVector<In>) return cudaErrorInvalidValue;
  int row_ctas = (p.rows + kWarps - 1) / kWarps, column_ctas = (p.columns + 32 * kVector<In> - 1) / (32 * kVector<In>);
  dim3 grid(row_ctas, std::clamp(kTargetCtas / row_ctas, 1, column_ctas));
  auto launch = [&](auto kernel) {
    return launch_pdl(kernel, grid, kWarps * 32, 0, stream, static_cast<const In*>(y), static_cast<Out*>(out), p);
  };
  if (p.k <= 2) return launch(combine<2, In, Out>);
  if (p.k <= 4) return launch(combine<4, In, Out>);
  if (p.k <= 8) return launch(combine<8, In, Out>);
  if (p.k <= kMaxTopK) return launch(combine<kMaxTopK, In, Out>);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// Compute out [rows, columns] from y [pairs, columns]. `place`, `ids` and `weights` (or null) are [rows, k]; ids are
// int32 if `narrow`, otherwise int64. y is bf16 if `from_bf16`, else fp32; out is bf16 if `to_bf16`, else fp32. fp32 to
// bf16, k > kMaxTopK, and rows of y that are not multiples of 16 bytes give cudaErrorInvalidValue. Not checked here:
// both matrices are contiguous and aligned to 16 bytes (`combine_rejects` in cuda_backend.py). Returns a cudaError_t.
extern "C" int alignkit_experts_combine(const void* y, int from_bf16, const int64_t* place, const void* ids, int narrow,
                                        const float* weights, void* out, int to_bf16, int rows, int k, int columns,
                                        int run, int width, cudaStream_t stream) {
  Combine p = {place, ids, weights, rows, k, columns, run, width, narrow != 0};
  if (!from_bf16) return to_bf16 ? cudaErrorInvalidValue : launch_combine<float, float>(y, out, p, stream);
  return to_bf16 ? launch_combine<__nv_bfloat16, __nv_bfloat16>(y, out, p, stream)
                 : launch_combine<__nv_bfloat16, float>(y, out, p, stream);
}

ALIGNKIT_FUNCTION(alignkit_experts_combine)
