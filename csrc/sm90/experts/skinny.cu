// The grouped GEMM of down.cu for few rows per expert (skinny GEMM), bound by the bandwidth of reading the matrices.
//
// Tile: operands are swapped. 64 rows of the expert's matrix are wgmma's M, and up to kWidth (8, 16 or 32) pairs are
// its N.
//
// Warp specialization: one producer thread issues TMA loads far ahead, without a pause at the ends of tiles. Four
// consumer warps, one warpgroup, multiply.
//
// Order of summation: that of down.cu.
//
// Launch: two persistent CTAs of 160 threads per SM.
//
// Called by alignkit/ops/moe_experts/few.py. Tile and launch shape change no bits.
#include <type_traits>

#include "experts.cuh"

namespace alignkit {
namespace {

constexpr int kMatrixRows = 64;         // hardware: rows of a matrix per tile, the M of wgmma
constexpr int kSkinnyThreads = 5 * 32;  // schedule: a consumer warpgroup and a producer warp

template <int kWidth>
struct SkinnyStage {
  __nv_bfloat16 weight[kMatrixRows * kStep];
  __nv_bfloat16 row[kWidth * kStep];
};

// Shared memory of a CTA; two CTAs share an SM.
template <int kWidth>
struct SkinnyShared {
  static constexpr int kDepth = 100 * 1024 / sizeof(SkinnyStage<kWidth>);  // schedule: pipeline stages
  SkinnyStage<kWidth> stage[kDepth];
  ExpertTable table;
  uint64_t full[kDepth], empty[kDepth];
};

// Pipeline position of the consumer warpgroup.
template <int kWidth>
struct SkinnyConsumer {
  using Sh = SkinnyShared<kWidth>;
  static constexpr int kSize = sizeof(SkinnyStage<kWidth>) >> 4, kSlices = kStep / 16;
  Sh& sh;
  uint64_t weight, row;  // descriptors of the first stage
  int stage = 0, phase = 0, slice = 0;

  __device__ SkinnyConsumer(Sh& sh)
      : sh(sh), weight(smem_descriptor<false>(sh.stage[0].weight)), row(smem_descriptor<false>(sh.stage[0].row)) {}

  // Accumulate a chain over the next `slices` steps of 16.
  __device__ __forceinline__ void chain(float (&acc)[kWidth / 2], int slices) {
#pragma unroll 1
    for (int i = 0; i < slices; ++i) {
      if (slice == 0) mbarrier_wait(&sh.full[stage], phase);
      int offset = stage * kSize + slice * kDescriptorStep<false>;
      warpgroup_arrive();
      wgmma<false, false>(acc, weight + offset, row + offset, i > 0);
      warpgroup_commit();
      if (++slice == kSlices) {
        warpgroup_wait<0>();
        next_stage();
      }
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc);
  }

  // Skip the unused rest of a tile's last stage.
  __device__ __forceinline__ void end() {
    if (slice) next_stage();
  }

  __device__ __forceinline__ void next_stage() {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&sh.empty[stage]);
    slice = 0;
    advance<Sh::kDepth>(stage, phase);
  }
};

// Position of a thread's accumulators in a tile.
// Accumulator 4 j + e is matrix row `row` of pair `pair` + 8 j + e; 4 j + 2 + e is row + 8 of the same pair.
struct SkinnyPlace {
  int row, pair;

  __device__ SkinnyPlace(int first_row, int first_pair)
      : row(first_row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4), pair(first_pair + threadIdx.x % 4 * 2) {}
};

struct SkinnyDown {
  void* out;
  int64_t pitch;
  bool round;
  int columns, k, leaf;
  Matrices weights;
  Experts experts;
};

// Producer thread.
template <int kWidth>
__device__ __forceinline__ void load_skinny(SkinnyShared<kWidth>& sh, const CUtensorMap* a, const CUtensorMap* stacked,
                                            const SkinnyDown& p) {
  constexpr int depth = SkinnyShared<kWidth>::kDepth;
  int stage = 0, phase = 0;
  Tile t;
  for (TileScheduler<kWidth> scheduler(sh.table, p.experts); scheduler.next(t);) {
    const CUtensorMap* map = p.weights.map(stacked, t.expert);
    int column = p.weights.first_row(t.expert) + t.column * kMatrixRows;
#pragma unroll 1
    for (int k = 0; k < p.k; k += kStep, advance<depth>(stage, phase)) {
      mbarrier_wait(&sh.empty[stage], phase ^ 1);
      auto& s = sh.stage[stage];
      mbarrier_expect_tx(&sh.full[stage], sizeof(s));
      tma_load(s.weight, map, k, column, &sh.full[stage]);
      tma_load(s.row, a, k, t.row, &sh.full[stage]);  // rows of the next expert are loaded but not stored
    }
  }
}

// Sum the balanced tree over the next kLeaves leaves.
template <int kLeaves, int kWidth>
__device__ __forceinline__ void sum_leaves(SkinnyConsumer<kWidth>& consumer, float (&acc)[kWidth / 2], int slices) {
  if constexpr (kLeaves == 1) {
    consumer.chain(acc, slices);
  } else {
    sum_leaves<kLeaves / 2>(consumer, acc, slices);
    float right[kWidth / 2];
    sum_leaves<kLeaves / 2>(consumer, right, slices);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) acc[i] = acc[i] + right[i];
  }
}

// Consumer warpgroup: sums the k-tree of each tile and stores it.
template <int kLeaves, int kWidth>
__device__ __forceinline__ void compute_skinny(SkinnyShared<kWidth>& sh, const SkinnyDown& p) {
  SkinnyConsumer<kWidth> consumer(sh);
  Tile t;
  for (TileScheduler<kWidth> scheduler(sh.table, p.experts); scheduler.next(t);) {
    float acc[kWidth / 2];
    sum_leaves<kLeaves>(consumer, acc, (p.leaf + 15) / 16);
    consumer.end();
    SkinnyPlace place(t.column * kMatrixRows, t.row);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      int column = place.row + i / 2 % 2 * 8;
      int64_t pair = place.pair + i / 4 * 8 + i % 2;
      if (pair >= t.end || column >= p.columns) continue;
      if (p.round)
        static_cast<__nv_bfloat16*>(p.out)[pair * p.pitch + column] = __float2bfloat16_rn(acc[i]);
      else
        static_cast<float*>(p.out)[pair * p.pitch + column] = acc[i];
    }
  }
}

// The skinny down kernel; see the top of the file.
template <int kLeaves, int kWidth>
__global__ void __launch_bounds__(kSkinnyThreads, 2)
    skinny_down(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap weights,
                const SkinnyDown p) {
  extern __shared__ uint8_t raw[];
  auto& sh = prologue<SkinnyShared<kWidth>, kWidth, 4>(raw, p.experts, 1);
  if (threadIdx.x < 4 * 32)
    compute_skinny<kLeaves, kWidth>(sh, p);
  else if (threadIdx.x == 4 * 32)
    load_skinny<kWidth>(sh, &a, &weights, p);
}

// Host code.

template <auto kKernel, class Shared, class... Arguments>
cudaError_t launch_skinny(int width, int pairs, const Experts& e, cudaStream_t stream, const Arguments&... arguments) {
  constexpr int bytes = sizeof(Shared) + 1024;
  static_assert(2 * (bytes + 1024) <= 228 * 1024);
  int sms;
  if (cudaError_t error = prepare<kKernel>(bytes, 1, &sms)) return error;
  int64_t tiles = std::min<int64_t>(pairs, pairs / width + e.count) * e.column_tiles;
  unsigned ctas = static_cast<unsigned>(std::min<int64_t>(tiles, 2 * sms));
  return launch_pdl(kKernel, ctas, kSkinnyThreads, bytes, stream, arguments...);
}

// Call f with the tile width for the average number of rows per expert.
template <class F>
cudaError_t dispatch_width(int pairs, int experts, F f) {
  if (pairs <= 4 * experts) return f(std::integral_constant<int, 8>());
  if (pairs <= 8 * experts) return f(std::integral_constant<int, 16>());
  return f(std::integral_constant<int, 32>());
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// Compute alignkit_experts_down for few rows per expert, with the same requirements, and pairs of at least 1. The maps
// of `each` are made by alignkit_experts_few_map.
extern "C" int alignkit_experts_few_down(const void* a, int64_t a_pitch, const void* weights, int64_t pitch,
                                         const void* each, const int64_t* offsets, int experts, void* out,
                                         int64_t out_pitch, int round, int pairs, int n, int k, int leaves,
                                         cudaStream_t stream) {
  if (experts < 1 || experts > kMaxExperts || (leaves > 1 && k % (16 * leaves))) return cudaErrorInvalidValue;
  CUtensorMap map = {};
  if (!each)
    if (cudaError_t e =
            make_tensor_map(&map, {weights, pitch}, Layout::kPlain, static_cast<int64_t>(experts) * n, k, kMatrixRows))
      return e;
  SkinnyDown p = {out,
                  out_pitch,
                  round != 0,
                  n,
                  k,
                  leaves > 1 ? k / leaves : k,
                  {static_cast<const CUtensorMap*>(each), n},
                  {offsets, experts, (n + kMatrixRows - 1) / kMatrixRows}};
  return dispatch_width(pairs, experts, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    CUtensorMap rows;
    if (cudaError_t e = make_tensor_map(&rows, {a, a_pitch}, Layout::kPlain, pairs, k, kWidth)) return e;
    auto launch = [&](auto number) {
      return launch_skinny<skinny_down<decltype(number)::value, kWidth>, SkinnyShared<kWidth>>(kWidth, pairs, p.experts,
                                                                                               stream, rows, map, p);
    };
    switch (leaves) {
      case 1: return launch(std::integral_constant<int, 1>());
      case 2: return launch(std::integral_constant<int, 2>());
      case 4: return launch(std::integral_constant<int, 4>());
      case 8: return launch(std::integral_constant<int, 8>());
      default: return cudaErrorInvalidValue;
    }
  });
}

// Write the 128-byte tensor map of a matrix [rows, k] for `each`.
extern "C" int alignkit_experts_few_map(void* map, const void* matrix, int64_t pitch, int rows, int k) {
  return write_tensor_map(map, {matrix, pitch}, rows, k, kMatrixRows);
}

ALIGNKIT_FUNCTION(alignkit_experts_few_down)
ALIGNKIT_FUNCTION(alignkit_experts_few_map)
