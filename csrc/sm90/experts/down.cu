// Grouped GEMM for the experts' down projection: rows in expert order, each times its expert's matrix.
//
// Tile: 128 pairs by 128 columns. This leaves registers for the accumulators of the k-tree: the current leaf, one
// finished leaf and the sum of two. The sum of four leaves waits in shared memory.
//
// Warp specialization: one producer thread issues TMA loads, without a pause at the ends of leaves and tiles. Two
// consumer warpgroups multiply 64 rows each.
//
// Order of summation (docs/contract.md, "Mixture of experts"): one chain over ascending k, or the k-tree, the balanced
// tree over 2, 4 or 8 leaves, each a chain. A leaf may end at any multiple of 16 of k.
//
// Launch: one persistent CTA of 384 threads per SM.
//
// Called by alignkit/ops/moe_experts/cuda_backend.py. Tile and launch shape change no bits.
#include "experts.cuh"

namespace alignkit {
namespace {

constexpr int kDownColumns = 128;                // schedule: columns per tile
constexpr int kAccumulators = kDownColumns / 2;  // per thread
constexpr int kDepth = 4;                        // schedule: pipeline stages
constexpr int kSlices = kStep / 16;              // k16 steps per stage

struct DownStage {
  __nv_bfloat16 a[kRows * kStep];
  __nv_bfloat16 b[kDownColumns * kStep];
};

constexpr int kDownBytes = sizeof(DownStage);

struct DownShared {
  DownStage stage[kDepth];
  float saved[2][kAccumulators * 128];  // sum of four leaves, by warpgroup and thread
  ExpertTable table;
  uint64_t full[kDepth], empty[kDepth];
};

struct Down {
  void* out;
  int64_t pitch;
  bool round;
  int columns, k, leaf;
  Matrices weights;
  Experts experts;
};

// Producer thread.
__device__ __forceinline__ void load_down(DownShared& sh, const CUtensorMap* a, const CUtensorMap* stacked,
                                          const Down& p) {
  int stage = 0, phase = 0;
  Tile t;
  for (TileScheduler<> scheduler(sh.table, p.experts); scheduler.next(t);) {
    const CUtensorMap* map = p.weights.map(stacked, t.expert);
    int column = p.weights.first_row(t.expert) + t.column * kDownColumns;
#pragma unroll 1
    for (int k = 0; k < p.k; k += kStep, advance<kDepth>(stage, phase)) {
      mbarrier_wait(&sh.empty[stage], phase ^ 1);
      mbarrier_expect_tx(&sh.full[stage], kDownBytes);
      tma_load(sh.stage[stage].b, map, k, column, &sh.full[stage]);
      tma_load(sh.stage[stage].a, a, k, t.row, &sh.full[stage]);  // rows of the next expert are loaded but not stored
    }
  }
}

// Pipeline position of a consumer warpgroup.
struct Consumer {
  DownShared& sh;
  uint64_t a, b;  // descriptors of the next 16 of k
  int stage = 0, phase = 0, slice = 0;
  int in_flight = -1;  // a stage that unfinished wgmmas may still read; -1: none

  __device__ Consumer(DownShared& sh, int group)
      : sh(sh),
        a(smem_descriptor<false>(sh.stage[0].a + group * kGroupRows * kStep)),
        b(smem_descriptor<false>(sh.stage[0].b)) {}

  __device__ void release(int released) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&sh.empty[released]);
  }

  // Accumulate a chain over the next `slices` steps of 16.
  __device__ void chain(float (&acc)[kAccumulators], int slices) {
    slices -= run_slices<true>(acc, slices);
#pragma unroll 1
    while (slices > 0) slices -= run_slices<false>(acc, slices);
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc);
    if (in_flight >= 0) release(in_flight);
    in_flight = -1;
  }

  // Issue wgmmas for the rest of the leaf or of the stage, whichever is shorter; return the number of k16 steps.
  template <bool kFirst>
  __device__ int run_slices(float (&acc)[kAccumulators], int slices) {
    if (slice == 0) mbarrier_wait(&sh.full[stage], phase);
    int count = min(kSlices - slice, slices);
    warpgroup_arrive();
    switch (count) {
      case 4: start_slices<kFirst, 4>(acc); break;
      case 3: start_slices<kFirst, 3>(acc); break;
      case 2: start_slices<kFirst, 2>(acc); break;
      default: start_slices<kFirst, 1>(acc);
    }
    slice += count;
    a += count * kDescriptorStep<false>;
    b += count * kDescriptorStep<false>;
    if (slice == kSlices) {
      warpgroup_wait<1>();  // all groups but the last
      if (in_flight >= 0) release(in_flight);
      in_flight = stage;
      next_stage();
    }
    return count;
  }

  template <bool kFirst, int kCount>
  __device__ void start_slices(float (&acc)[kAccumulators]) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (kFirst && j == 0)
        wgmma_zero<false, false>(acc, a, b);
      else
        wgmma<false, false>(acc, a + j * kDescriptorStep<false>, b + j * kDescriptorStep<false>, true);
    }
    warpgroup_commit();
  }

  // Skip the unused rest of a tile's last stage.
  __device__ void end() {
    if (slice == 0) return;
    release(stage);
    next_stage();
  }

  __device__ void next_stage() {
    constexpr int size = kDownBytes >> 4;
    int consumed = slice * kDescriptorStep<false>;
    a += size - consumed;
    b += size - consumed;
    slice = 0;
    advance<kDepth>(stage, phase);
    if (stage == 0) {
      a -= kDepth * size;
      b -= kDepth * size;
    }
  }
};

__device__ __forceinline__ void add(float (&sums)[kAccumulators], const float (&terms)[kAccumulators]) {
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) sums[i] = sums[i] + terms[i];
}

// The balanced tree over the next kLeaves leaves.
template <int kLeaves>
struct Tree {
  static __device__ __forceinline__ void sum(Consumer& consumer, float (&acc)[kAccumulators], int slices,
                                             float* saved) {
    Tree<kLeaves / 2>::sum(consumer, acc, slices, saved);
    float right[kAccumulators];
    Tree<kLeaves / 2>::sum(consumer, right, slices, saved);
    add(acc, right);
  }
};

template <>
struct Tree<8> {
  static __device__ __forceinline__ void sum(Consumer& consumer, float (&acc)[kAccumulators], int slices,
                                             float* saved) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if (half == 1) {
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) saved[i * 128] = acc[i];
      }
      Tree<4>::sum(consumer, acc, slices, saved);
    }
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) acc[i] = saved[i * 128] + acc[i];
  }
};

template <>
struct Tree<1> {
  static __device__ __forceinline__ void sum(Consumer& consumer, float (&acc)[kAccumulators], int slices, float*) {
    consumer.chain(acc, slices);
  }
};

// Consumer warpgroup: sums the k-tree of 64 pairs of each tile and stores it.
template <int kLeaves>
__device__ __forceinline__ void compute_down(DownShared& sh, const Down& p) {
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0), slices = (p.leaf + 15) / 16;
  float* saved = sh.saved[group] + threadIdx.x % 128;
  Consumer consumer(sh, group);
  Tile t;
  for (TileScheduler<> scheduler(sh.table, p.experts); scheduler.next(t);) {
    float acc[kAccumulators];
    Tree<kLeaves>::sum(consumer, acc, slices, saved);
    consumer.end();
    int column = t.column * kDownColumns;
    Coords place(t.end, t.row + group * kGroupRows, column);
    if (p.round) {
      store_rows(acc, place, static_cast<__nv_bfloat16*>(p.out), p.pitch, p.columns, column);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 2) {
      int h = i / 2 % 2, j = place.column + i / 4 * 8;
      if (place.valid[h] && j < p.columns)
        *reinterpret_cast<float2*>(static_cast<float*>(p.out) + (place.row + 8 * h) * p.pitch + j) =
            make_float2(acc[i], acc[i + 1]);
    }
  }
}

// The down kernel; see the top of the file.
template <int kLeaves>
__global__ void __launch_bounds__(kThreads, 1)
    down(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap weights, const Down p) {
  extern __shared__ uint8_t raw[];
  DownShared& sh = prologue<DownShared>(raw, p.experts, 1);
  if (threadIdx.x / 128 == 2) {
    setmaxnreg_dec<24>();
    if (threadIdx.x == 2 * 128) load_down(sh, &a, &weights, p);
  } else {
    setmaxnreg_inc<240>();
    compute_down<kLeaves>(sh, p);
  }
}

template <int kLeaves>
cudaError_t launch_down(const CUtensorMap& a, const CUtensorMap& weights, const Down& p, int pairs,
                        cudaStream_t stream) {
  constexpr auto kernel = down<kLeaves>;
  constexpr int bytes = sizeof(DownShared) + 1024;
  int sms;
  if (cudaError_t e = prepare<kernel>(bytes, 1, &sms)) return e;
  return launch_pdl(kernel, grid_size(pairs, p.experts, sms), kThreads, bytes, stream, a, weights, p);
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// Compute out [pairs, n], bf16 if `round`, else fp32: each row of a [pairs, k] times its expert's [n, k], transposed.
// The matrices are given as in alignkit_experts_gate_up. `leaves` is 1, 2, 4 or 8. Not checked here:
// k is a multiple of 16 leaves if leaves > 1 (`products_unsupported` in cuda_backend.py). Returns a cudaError_t.
extern "C" int alignkit_experts_down(const void* a, int64_t a_pitch, const void* weights, int64_t pitch,
                                     const void* each, const int64_t* offsets, int experts, void* out,
                                     int64_t out_pitch, int round, int pairs, int n, int k, int leaves,
                                     cudaStream_t stream) {
  if (experts < 1 || experts > kMaxExperts || (leaves > 1 && k % (16 * leaves))) return cudaErrorInvalidValue;
  CUtensorMap maps[2] = {};
  if (cudaError_t e = make_tensor_map(&maps[0], {a, a_pitch}, Layout::kPlain, pairs, k, kRows)) return e;
  if (!each)
    if (cudaError_t e = make_tensor_map(&maps[1], {weights, pitch}, Layout::kPlain, static_cast<int64_t>(experts) * n,
                                        k, kDownColumns))
      return e;
  Down p = {out,
            out_pitch,
            round != 0,
            n,
            k,
            leaves > 1 ? k / leaves : k,
            {static_cast<const CUtensorMap*>(each), n},
            {offsets, experts, (n + kDownColumns - 1) / kDownColumns}};
  switch (leaves) {
    case 1: return launch_down<1>(maps[0], maps[1], p, pairs, stream);
    case 2: return launch_down<2>(maps[0], maps[1], p, pairs, stream);
    case 4: return launch_down<4>(maps[0], maps[1], p, pairs, stream);
    case 8: return launch_down<8>(maps[0], maps[1], p, pairs, stream);
    default: return cudaErrorInvalidValue;
  }
}

// Write the 128-byte tensor map of a matrix [n, k] for `each`.
extern "C" int alignkit_experts_down_map(void* map, const void* matrix, int64_t pitch, int rows, int k) {
  return write_tensor_map(map, {matrix, pitch}, rows, k, kDownColumns);
}

ALIGNKIT_FUNCTION(alignkit_experts_down)
ALIGNKIT_FUNCTION(alignkit_experts_down_map)
