// The pairs of a row and one of its experts in the order of experts, those of an expert in the order of ids: how many of a block's
// ids each expert has, and then each id behind those of its expert that come before it. Nothing is added in an order that could
// matter.
#include <cstdint>

#include "../ptx/dependent_launch.cuh"

namespace alignkit {
namespace {

constexpr int kMostExperts = 1024;
constexpr int kWarps = 8;
constexpr int kEach = 8;  // ids of a lane
constexpr int kIds = kWarps * 32 * kEach;  // of a block

struct Ids {
  const void* ids;  // int64, or int32
  bool narrow;
  int count, top_k;
  int64_t first;  // expert that counts
  int experts;
  int* counts;  // [blocks, experts + 1] of each block's ids
};

struct Found {
  int64_t *row, *choice, *place, *offsets;
};

// The number of an id's expert among those that count; for one that is none of them, `experts`; behind the last id, beyond.
__device__ __forceinline__ int expert_of(const Ids& p, int i) {
  if (i >= p.count) return p.experts + 1;
  int64_t id = p.narrow ? static_cast<const int*>(p.ids)[i] : static_cast<const int64_t*>(p.ids)[i];
  id -= p.first;
  return id >= 0 && id < p.experts ? static_cast<int>(id) : p.experts;
}

// How many of each expert a warp's ids are, to `at`. Of its ids, `mine` has those of this lane.
__device__ __forceinline__ void count_ids(const Ids& p, int (&mine)[kEach], int* at) {
  int lane = threadIdx.x % 32, begin = blockIdx.x * kIds + threadIdx.x / 32 * 32 * kEach + lane;
#pragma unroll
  for (int i = 0; i < kEach; ++i) mine[i] = expert_of(p, begin + i * 32);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    unsigned same = __match_any_sync(~0u, mine[i]);
    if (__ffs(same) - 1 == lane && mine[i] <= p.experts) at[mine[i]] += __popc(same);
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kWarps * 32) count_pairs(const Ids p) {
  __shared__ int at[kWarps][kMostExperts + 1];
  for (int i = threadIdx.x; i < kWarps * (kMostExperts + 1); i += kWarps * 32) (&at[0][0])[i] = 0;
  __syncthreads();
  wait_for_kernel_before();
  let_next_kernel_begin();
  int mine[kEach];
  count_ids(p, mine, at[threadIdx.x / 32]);
  __syncthreads();
  for (int e = threadIdx.x; e <= p.experts; e += kWarps * 32) {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += at[w][e];
    p.counts[static_cast<int64_t>(blockIdx.x) * (p.experts + 1) + e] = sum;
  }
}

__global__ void __launch_bounds__(kWarps * 32) place_pairs(const Ids p, const Found to) {
  __shared__ int at[kWarps][kMostExperts + 1];
  __shared__ int first[kMostExperts + 1];  // pair of an expert
  for (int i = threadIdx.x; i < kWarps * (kMostExperts + 1); i += kWarps * 32) (&at[0][0])[i] = 0;
  __syncthreads();
  wait_for_kernel_before();
  let_next_kernel_begin();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, wide = p.experts + 1;
  int mine[kEach];
  count_ids(p, mine, at[warp]);
  constexpr int most = (kMostExperts + kWarps * 32) / (kWarps * 32);
  int before[most];  // ids of an expert, in other blocks
#pragma unroll
  for (int j = 0; j < most; ++j) {
    int e = threadIdx.x + j * kWarps * 32, all = 0;
    before[j] = 0;
    if (e > p.experts) continue;
#pragma unroll 8
    for (unsigned b = 0; b < gridDim.x; ++b) {
      int count = p.counts[static_cast<int64_t>(b) * wide + e];
      all += count;
      before[j] += b < blockIdx.x ? count : 0;
    }
    first[e] = all;
  }
  __syncthreads();
  if (warp == 0) {
    int sum = 0;
    for (int i = 0; i < wide; i += 32) {
      int e = i + lane, all = e < wide ? first[e] : 0, through = all;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        int other = __shfl_up_sync(~0u, through, distance);
        if (lane >= distance) through += other;
      }
      if (e < wide) first[e] = sum + through - all;
      sum += __shfl_sync(~0u, through, 31);
    }
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < most; ++j) {
    int e = threadIdx.x + j * kWarps * 32;
    if (e > p.experts) continue;
    if (blockIdx.x == 0) to.offsets[e] = first[e];
    int next = first[e] + before[j];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      int count = at[w][e];
      at[w][e] = next;
      next += count;
    }
  }
  __syncthreads();
  int begin = blockIdx.x * kIds + warp * 32 * kEach + lane;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    int i = begin + j * 32, e = mine[j];
    unsigned same = __match_any_sync(~0u, e);
    if (e <= p.experts) {
      int pair = at[warp][e] + __popc(same & ((1u << lane) - 1));
      to.place[i] = e < p.experts ? pair : -1;
      to.row[pair] = i / p.top_k;
      to.choice[pair] = i;
    }
    __syncwarp();
    if (__ffs(same) - 1 == lane && e <= p.experts) at[warp][e] += __popc(same);
    __syncwarp();
  }
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// Of `count` ids, int32 if `narrow`, else int64, `top_k` of a row: the pairs of the `experts` experts from `first` on, and behind
// those the other ids. row and choice [count], place [count], -1 for these, offsets [experts + 1]. `counts` is a workspace of
// ceil(count / 2048) (experts + 1) ints. Returns a cudaError_t.
extern "C" int alignkit_experts_pairs(const void* ids, int narrow, int count, int top_k, int64_t first, int experts,
                                      int* counts, int64_t* row, int64_t* choice, int64_t* place, int64_t* offsets,
                                      cudaStream_t stream) {
  if (experts > kMostExperts) return cudaErrorInvalidValue;
  Ids p = {ids, narrow != 0, count, top_k, first, experts, counts};
  unsigned blocks = (count + kIds - 1) / kIds;
  if (cudaError_t e = launch_early(count_pairs, blocks, kWarps * 32, 0, stream, p)) return e;
  return launch_early(place_pairs, blocks, kWarps * 32, 0, stream, p, Found{row, choice, place, offsets});
}
