// Stable counting sort of the pairs (token, expert) by expert, from the router's ids, in two kernels.
//
// count_pairs counts each CTA's ids by expert. place_pairs sums the counts of all CTAs and writes every pair behind its
// expert's earlier ids. All arithmetic is on integers, so no result depends on the schedule.
// Called by alignkit/ops/moe_experts/cuda_backend.py, which checks that count < 2^31.
//
// Launch: both kernels use one CTA of 8 warps per kIdsPerCta ids.
#include <cstdint>

#include "../../interface.h"
#include "../ptx/pdl.cuh"
#include "alignkit/runtime/kernels.h"

namespace alignkit {
namespace {

constexpr int kWarps = 8;  // schedule: warps per CTA
constexpr int kIdsPerLane = kIdsPerCta / (kWarps * 32);
static_assert(kIdsPerCta % (kWarps * 32) == 0);

struct Ids {
  const void* ids;  // int64, or int32 if `narrow`
  bool narrow;
  int count, top_k;
  int64_t first;  // first local expert
  int experts;
  int* counts;  // [CTAs, experts + 1], ids per CTA and expert
};

// Outputs: a pair's row and id index, an id's pair, and each expert's first pair.
struct PairLists {
  int64_t *row, *choice, *place, *offsets;
};

// Return the local index of id i's expert; `experts` for an id of no local expert; experts + 1 past the last id.
__device__ __forceinline__ int expert_of(const Ids& p, int i) {
  if (i >= p.count) return p.experts + 1;
  int64_t id = p.narrow ? static_cast<const int*>(p.ids)[i] : static_cast<const int64_t*>(p.ids)[i];
  id -= p.first;
  return id >= 0 && id < p.experts ? static_cast<int>(id) : p.experts;
}

// Add the counts of a warp's ids by expert to `counter`; set `expert` to the local experts of this lane's ids.
__device__ __forceinline__ void count_ids(const Ids& p, int (&expert)[kIdsPerLane], int* counter) {
  int lane = threadIdx.x % 32, begin = blockIdx.x * kIdsPerCta + threadIdx.x / 32 * 32 * kIdsPerLane + lane;
#pragma unroll
  for (int i = 0; i < kIdsPerLane; ++i) expert[i] = expert_of(p, begin + i * 32);
#pragma unroll
  for (int i = 0; i < kIdsPerLane; ++i) {
    unsigned peers = __match_any_sync(~0u, expert[i]);
    if (__ffs(peers) - 1 == lane && expert[i] <= p.experts) counter[expert[i]] += __popc(peers);
    __syncwarp();
  }
}

// Count each CTA's ids by expert.
__global__ void __launch_bounds__(kWarps * 32) count_pairs(const Ids p) {
  __shared__ int counter[kWarps][kMaxExperts + 1];
  for (int i = threadIdx.x; i < kWarps * (kMaxExperts + 1); i += kWarps * 32) (&counter[0][0])[i] = 0;
  __syncthreads();
  griddep_wait();
  griddep_launch_dependents();
  int expert[kIdsPerLane];
  count_ids(p, expert, counter[threadIdx.x / 32]);
  __syncthreads();
  for (int e = threadIdx.x; e <= p.experts; e += kWarps * 32) {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += counter[w][e];
    p.counts[static_cast<int64_t>(blockIdx.x) * (p.experts + 1) + e] = sum;
  }
}

// Write each id's pair behind the pairs of smaller experts and of the expert's earlier ids.
__global__ void __launch_bounds__(kWarps * 32) place_pairs(const Ids p, const PairLists lists) {
  __shared__ int counter[kWarps][kMaxExperts + 1];
  __shared__ int first[kMaxExperts + 1];  // first pair of each expert
  for (int i = threadIdx.x; i < kWarps * (kMaxExperts + 1); i += kWarps * 32) (&counter[0][0])[i] = 0;
  __syncthreads();
  griddep_wait();
  griddep_launch_dependents();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, counters = p.experts + 1;
  int expert[kIdsPerLane];
  count_ids(p, expert, counter[warp]);
  constexpr int per_thread = (kMaxExperts + kWarps * 32) / (kWarps * 32);
  int before[per_thread];  // ids of an expert in earlier CTAs
#pragma unroll
  for (int j = 0; j < per_thread; ++j) {
    int e = threadIdx.x + j * kWarps * 32, total = 0;
    before[j] = 0;
    if (e > p.experts) continue;
#pragma unroll 8
    for (unsigned b = 0; b < gridDim.x; ++b) {
      int count = p.counts[static_cast<int64_t>(b) * counters + e];
      total += count;
      before[j] += b < blockIdx.x ? count : 0;
    }
    first[e] = total;
  }
  __syncthreads();
  if (warp == 0) {
    int sum = 0;
    for (int i = 0; i < counters; i += 32) {
      int e = i + lane, total = e < counters ? first[e] : 0, inclusive = total;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        int other = __shfl_up_sync(~0u, inclusive, distance);
        if (lane >= distance) inclusive += other;
      }
      if (e < counters) first[e] = sum + inclusive - total;
      sum += __shfl_sync(~0u, inclusive, 31);
    }
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < per_thread; ++j) {
    int e = threadIdx.x + j * kWarps * 32;
    if (e > p.experts) continue;
    if (blockIdx.x == 0) lists.offsets[e] = first[e];
    int next = first[e] + before[j];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      int count = counter[w][e];
      counter[w][e] = next;
      next += count;
    }
  }
  __syncthreads();
  int begin = blockIdx.x * kIdsPerCta + warp * 32 * kIdsPerLane + lane;
#pragma unroll
  for (int j = 0; j < kIdsPerLane; ++j) {
    int i = begin + j * 32, e = expert[j];
    unsigned peers = __match_any_sync(~0u, e);
    if (e <= p.experts) {
      int pair = counter[warp][e] + __popc(peers & ((1u << lane) - 1));
      lists.place[i] = e < p.experts ? pair : -1;
      lists.row[pair] = i / p.top_k;
      lists.choice[pair] = i;
    }
    __syncwarp();
    if (__ffs(peers) - 1 == lane && e <= p.experts) counter[warp][e] += __popc(peers);
    __syncwarp();
  }
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// Sort `count` ids, int32 if `narrow`, otherwise int64, `top_k` per row. The pairs of the `experts` experts from
// `first` on come first, then the other ids.
// Writes row and choice [count], place [count] with -1 for the other ids, and offsets [experts + 1]. `counts` is a
// workspace of ceil(count / 2048) * (experts + 1) ints. Returns a cudaError_t.
extern "C" int alignkit_experts_pairs(const void* ids, int narrow, int count, int top_k, int64_t first, int experts,
                                      int* counts, int64_t* row, int64_t* choice, int64_t* place, int64_t* offsets,
                                      cudaStream_t stream) {
  if (count < 1 || top_k < 1 || experts < 1 || experts > kMaxExperts) return cudaErrorInvalidValue;
  Ids p = {ids, narrow != 0, count, top_k, first, experts, counts};
  unsigned ctas = (count + kIdsPerCta - 1) / kIdsPerCta;
  if (cudaError_t e = launch_pdl(count_pairs, ctas, kWarps * 32, 0, stream, p)) return e;
  return launch_pdl(place_pairs, ctas, kWarps * 32, 0, stream, p, PairLists{row, choice, place, offsets});
}

ALIGNKIT_FUNCTION(alignkit_experts_pairs)
