// What a row gets of its experts: the balanced tree over experts, in fp32, of its pairs' rows, each times the router's weight.
//
// A warp takes a row, or of few rows some of its columns. Lane n finds the n-th of the row's experts in the order of the tree, and whose sum the sum from it on is
// added to. Then each lane adds 16 bytes of columns at a time, of which all pairs' are on their way together.
#include <algorithm>
#include <climits>
#include <cstdint>

#include <cuda_bf16.h>

#include "../ptx/dependent_launch.cuh"

namespace alignkit {
namespace {

constexpr int kWarps = 8;
constexpr int kEnough = 256;  // blocks, for all multiprocessors to have some

struct Combine {
  const int64_t* place;  // of a row's ids: the pair, or -1
  const void* ids;       // int64, or int32
  const float* weights;  // null: 1
  int rows, k, columns;
  int run, width;  // of the tree: an expert's leaf is id / run * width + id % run
  bool narrow;     // ids are int32
};

template <class T>
constexpr int kVector = 16 / sizeof(T);

// The i-th of 16 bytes of T.
template <class T>
__device__ __forceinline__ float number(const uint4& bits, int i) {
  uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
  if (sizeof(T) == 4) return __uint_as_float(words[i]);
  return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16);
}

__device__ __forceinline__ void write(float* out, const float (&v)[4]) {
  *reinterpret_cast<float4*>(out) = make_float4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ void write(float* out, const float (&v)[8]) {
  reinterpret_cast<float4*>(out)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(out)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

__device__ __forceinline__ void write(__nv_bfloat16* out, const float (&v)[8]) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
    w[i] = *reinterpret_cast<uint32_t*>(&pair);
  }
  *reinterpret_cast<uint4*>(out) = make_uint4(w[0], w[1], w[2], w[3]);
}

// kMost: ids of a row.
template <int kMost, class In, class Out>
__global__ void __launch_bounds__(kWarps * 32) combine(const In* y, Out* out, const Combine p) {
  constexpr int count_of = kVector<In>, some = kMost > 8 ? count_of / 2 : count_of;  // that are added together
  wait_for_kernel_before();
  let_next_kernel_begin();
  int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  int lane = threadIdx.x % 32;
  if (row >= p.rows) return;

  int64_t pair = -1;
  int leaf = INT_MAX;  // of what is no expert here: behind all
  float weight = 1.0f;
  if (lane < p.k) {
    int64_t i = row * p.k + lane;
    pair = p.place[i];
    int id = p.narrow ? static_cast<const int*>(p.ids)[i] : static_cast<int>(static_cast<const int64_t*>(p.ids)[i]);
    if (pair >= 0) leaf = id / p.run * p.width + id % p.run;
    if (p.weights) weight = p.weights[i];
  }
  int before = 0, nth = 0;
  for (int i = 0; i < p.k; ++i) {
    int other = __shfl_sync(~0u, leaf, i);
    before += other < leaf || (other == leaf && i < lane);
  }
  for (int i = 0; i < p.k; ++i)
    if (__shfl_sync(~0u, before, i) == lane) nth = i;
  leaf = __shfl_sync(~0u, leaf, nth);
  pair = __shfl_sync(~0u, pair, nth);
  weight = __shfl_sync(~0u, weight, nth);
  int count = __popc(__ballot_sync(~0u, lane < p.k && pair >= 0));
  // The right one of two sums begins where it and the leaf before part; the left one with the first leaf on its side.
  int level = 32 - __clz(leaf ^ __shfl_up_sync(~0u, leaf, 1)), left = -1;
  for (int i = p.k - 1; i >= 0; --i) {
    int other = __shfl_sync(~0u, leaf, i);
    if (i < lane && lane < count && other >> level == leaf >> level) left = i;
  }

  int64_t from[kMost];
  float weights[kMost];
  int to[kMost];
#pragma unroll
  for (int n = 0; n < kMost; ++n) {
    from[n] = __shfl_sync(~0u, pair, n) * p.columns;
    weights[n] = __shfl_sync(~0u, weight, n);
    to[n] = __shfl_sync(~0u, left, n);
  }
  for (int j = (blockIdx.y * 32 + lane) * count_of; j < p.columns; j += gridDim.y * 32 * count_of) {
    uint4 held[kMost];
#pragma unroll
    for (int n = 0; n < kMost; ++n)
      if (n < count) held[n] = *reinterpret_cast<const uint4*>(y + from[n] + j);
    float sums[count_of];
#pragma unroll
    for (int first = 0; first < count_of; first += some) {
      float v[kMost][some];
#pragma unroll
      for (int n = 0; n < kMost; ++n)
#pragma unroll
        for (int i = 0; i < some; ++i) {
          float x = n < count ? number<In>(held[n], first + i) : 0.0f;
          v[n][i] = (p.weights && n < count ? weights[n] * x : x) + 0.0f;
        }
      // Those behind have been added up by then, and those in front in the order of their levels.
#pragma unroll
      for (int a = kMost - 2; a >= 0; --a)
#pragma unroll
        for (int b = a + 1; b < kMost; ++b)
          if (to[b] == a) {
#pragma unroll
            for (int i = 0; i < some; ++i) v[a][i] = v[a][i] + v[b][i];
          }
#pragma unroll
      for (int i = 0; i < some; ++i) sums[first + i] = v[0][i];
    }
    write(out + row * p.columns + j, sums);
  }
}

template <class In, class Out>
cudaError_t launch_combine(const void* y, void* out, const Combine& p, cudaStream_t stream) {
  int down = (p.rows + kWarps - 1) / kWarps, across = (p.columns + 32 * kVector<In> - 1) / (32 * kVector<In>);
  dim3 blocks(down, std::clamp(kEnough / down, 1, across));
  auto launch = [&](auto kernel) {
    return launch_early(kernel, blocks, kWarps * 32, 0, stream, static_cast<const In*>(y), static_cast<Out*>(out), p);
  };
  if (p.k <= 2) return launch(combine<2, In, Out>);
  if (p.k <= 4) return launch(combine<4, In, Out>);
  if (p.k <= 8) return launch(combine<8, In, Out>);
  if (p.k <= 16) return launch(combine<16, In, Out>);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// out [rows, columns] of y [pairs, columns]; `place` and `weights`, or null, [rows, k], `ids` likewise, int32 if `narrow`. y is
// bf16 if `from_bf16`, else fp32; out is bf16 if `to_bf16`. Rows at multiples of 16 bytes. Returns a cudaError_t.
extern "C" int alignkit_experts_combine(const void* y, int from_bf16, const int64_t* place, const void* ids, int narrow,
                                        const float* weights, void* out, int to_bf16, int rows, int k, int columns,
                                        int run, int width, cudaStream_t stream) {
  Combine p = {place, ids, weights, rows, k, columns, run, width, narrow != 0};
  if (!from_bf16) return to_bf16 ? cudaErrorInvalidValue : launch_combine<float, float>(y, out, p, stream);
  return to_bf16 ? launch_combine<__nv_bfloat16, __nv_bfloat16>(y, out, p, stream)
                 : launch_combine<__nv_bfloat16, float>(y, out, p, stream);
}
