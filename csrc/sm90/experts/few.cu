// Products of few rows an expert, as fast as its matrix can be read: gate and up with silu(gate) * up, and the balanced tree of
// 1, 2, 4 or 8 chains over leaves of k.
//
// A matrix's rows are rows to the tensor core, 64 to a tile, or 64 of gate and 64 of up; those that chose the expert, up to
// kWidth, are its columns. One warp brings operands to shared memory, far ahead and through the ends of tiles, four multiply.
#include <type_traits>

#include "../ptx/exponential.cuh"
#include "experts.cuh"

namespace alignkit {
namespace {

constexpr int kTile = 64;  // rows of a matrix
constexpr int kFewThreads = 5 * 32;
constexpr int kFewLag = 2;  // copies that are on their way when one is waited for

template <int kMatrices, int kWidth>
struct FewStage {
  __nv_bfloat16 weight[kMatrices][kTile * kStep];
  __nv_bfloat16 row[kWidth * kStep];
};

// Two blocks share a multiprocessor.
template <int kMatrices, int kWidth>
struct FewShared {
  static constexpr int kDepth = 100 * 1024 / sizeof(FewStage<kMatrices, kWidth>);
  FewStage<kMatrices, kWidth> stage[kDepth];
  Rows rows;
  uint64_t full[kDepth], empty[kDepth];
};

// Where the warps that multiply are in the ring.
template <int kMatrices, int kWidth>
struct FewReader {
  using Sh = FewShared<kMatrices, kWidth>;
  static constexpr int kSize = sizeof(FewStage<kMatrices, kWidth>) >> 4, kSlices = kStep / 16;
  Sh& sh;
  uint64_t weight, row;  // operands of the first stage
  int stage = 0, phase = 0, slice = 0;

  __device__ FewReader(Sh& sh) : sh(sh), weight(operand<false>(sh.stage[0].weight)), row(operand<false>(sh.stage[0].row)) {}

  // Chains over the next `slices` of 16, one for each matrix.
  __device__ __forceinline__ void chain(float (&sums)[kMatrices][kWidth / 2], int slices) {
#pragma unroll 1
    for (int i = 0; i < slices; ++i) {
      if (slice == 0) barrier_wait(&sh.full[stage], phase);
      int at = stage * kSize + slice * kNext<false>;
      products_begin();
#pragma unroll
      for (int m = 0; m < kMatrices; ++m)
        multiply<false, false>(sums[m], weight + at + m * (kTile * kStep * 2 >> 4), row + at, i > 0);
      products_end();
      if (++slice == kSlices) {
        products_wait<0>();
        next_stage();
      }
    }
    products_wait<0>();
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) products_taken(sums[m]);
  }

  // The rest of the last stage of a tile has nothing.
  __device__ __forceinline__ void end() {
    if (slice) next_stage();
  }

  __device__ __forceinline__ void next_stage() {
    if (threadIdx.x % 32 == 0) barrier_arrive(&sh.empty[stage]);
    slice = 0;
    step<Sh::kDepth>(stage, phase);
  }
};

// A thread's sums of a tile: matrix row `row` and row + 8, at 4 j + e and 4 j + 2 + e the pair `pair` + 8 j + e.
struct FewPlace {
  int row, pair;

  __device__ FewPlace(int first_row, int first_pair)
      : row(first_row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4), pair(first_pair + threadIdx.x % 4 * 2) {}
};

// Gate and up.

struct FewGateUp {
  const __nv_bfloat16* x;
  int64_t x_pitch;
  const int64_t* row;  // of x, a pair
  __nv_bfloat16 *h, *y;
  int features, k;
  Matrices weights;
  Experts experts;
};

template <int kWidth>
__device__ __forceinline__ void bring_gathered(FewShared<2, kWidth>& sh, const CUtensorMap* all, const FewGateUp& p) {
  constexpr int depth = FewShared<2, kWidth>::kDepth, vectors = kStep / 8, at_once = 32 / vectors, each = kWidth / at_once;
  int lane = threadIdx.x % 32, column = lane % vectors * 8, at = lane / vectors;
  int stage = 0, phase = 0, pending = 0, announced = 0;
  auto announce = [&] {
    shared_written();
    __syncwarp();
    if (lane == 0) barrier_arrive(&sh.full[announced]);
    if (++announced == depth) announced = 0;
  };
  Tile t;
  for (Walk<kWidth> walk(sh.rows, p.experts); walk.next(t);) {
    const __nv_bfloat16* from[each];
    int pairs = t.end - t.row;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      int r = at + i * at_once;
      from[i] = p.x + (r < pairs ? p.row[t.row + r] : 0) * p.x_pitch + column;
    }
    const CUtensorMap* map = p.weights.map(all, t.expert);
    int gate = p.weights.first_row(t.expert) + t.column * kTile;
#pragma unroll 1
    for (int k = 0; k < p.k; k += kStep, step<depth>(stage, phase)) {
      barrier_wait(&sh.empty[stage], phase ^ 1);
      auto& s = sh.stage[stage];
      if (lane == 0) {
        barrier_expect(&sh.full[stage], sizeof(s.weight));
        copy_box(s.weight[0], map, k, gate, &sh.full[stage]);
        copy_box(s.weight[1], map, k, gate + p.features, &sh.full[stage]);
      }
#pragma unroll
      for (int i = 0; i < each; ++i) {
        int r = at + i * at_once;  // of 128 bytes, whose vectors are swizzled
        copy_vector(s.row + r * kStep + (column ^ r % 8 * 8), from[i] + k, r < pairs && k + column < p.k);
      }
      copies_end();
      if (pending < kFewLag) {
        ++pending;
      } else {
        copies_wait<kFewLag>();
        announce();
      }
    }
  }
  copies_wait<0>();
  for (; pending; --pending) announce();
}

template <int kWidth>
__device__ __forceinline__ void multiply_few_gated(FewShared<2, kWidth>& sh, const FewGateUp& p) {
  FewReader<2, kWidth> reader(sh);
  Tile t;
  for (Walk<kWidth> walk(sh.rows, p.experts); walk.next(t);) {
    float sums[2][kWidth / 2];
    reader.chain(sums, (p.k + 15) / 16);
    reader.end();
    FewPlace place(t.column * kTile, t.row);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      int feature = place.row + i / 2 % 2 * 8;
      int64_t pair = place.pair + i / 4 * 8 + i % 2;
      if (pair >= t.end || feature >= p.features) continue;
      __nv_bfloat16 gate = __float2bfloat16_rn(sums[0][i]), up = __float2bfloat16_rn(sums[1][i]);
      if (p.h) {
        p.h[pair * 2 * p.features + feature] = gate;
        p.h[pair * 2 * p.features + p.features + feature] = up;
      }
      float g = __bfloat162float(gate), u = __bfloat162float(up);
      p.y[pair * p.features + feature] = __float2bfloat16_rn(__fdiv_rn(g, 1.0f + exponential(-g)) * u);
    }
  }
}

template <int kWidth>
__global__ void __launch_bounds__(kFewThreads, 2)
    few_gate_up(const __grid_constant__ CUtensorMap weights, const FewGateUp p) {
  extern __shared__ uint8_t raw[];
  // The copy engine's bytes, and the warp that gathers.
  auto& sh = begin_block<FewShared<2, kWidth>, kWidth, 4>(raw, p.experts, 1 + 1);
  if (threadIdx.x / 32 == 4)
    bring_gathered<kWidth>(sh, &weights, p);
  else
    multiply_few_gated<kWidth>(sh, p);
}

// Down.

struct FewDown {
  void* out;
  int64_t pitch;
  bool round;
  int columns, k, leaf;
  Matrices weights;
  Experts experts;
};

template <int kWidth>
__device__ __forceinline__ void bring_in_order(FewShared<1, kWidth>& sh, const CUtensorMap* a, const CUtensorMap* all,
                                               const FewDown& p) {
  constexpr int depth = FewShared<1, kWidth>::kDepth;
  int stage = 0, phase = 0;
  Tile t;
  for (Walk<kWidth> walk(sh.rows, p.experts); walk.next(t);) {
    const CUtensorMap* map = p.weights.map(all, t.expert);
    int column = p.weights.first_row(t.expert) + t.column * kTile;
#pragma unroll 1
    for (int k = 0; k < p.k; k += kStep, step<depth>(stage, phase)) {
      barrier_wait(&sh.empty[stage], phase ^ 1);
      auto& s = sh.stage[stage];
      barrier_expect(&sh.full[stage], sizeof(s));
      copy_box(s.weight[0], map, k, column, &sh.full[stage]);
      copy_box(s.row, a, k, t.row, &sh.full[stage]);  // of rows of the next expert nothing is stored
    }
  }
}

// The balanced tree over the next kLeaves leaves.
template <int kLeaves, int kWidth>
__device__ __forceinline__ void few_leaves(FewReader<1, kWidth>& reader, float (&sums)[1][kWidth / 2], int slices) {
  if constexpr (kLeaves == 1) {
    reader.chain(sums, slices);
  } else {
    few_leaves<kLeaves / 2>(reader, sums, slices);
    float right[1][kWidth / 2];
    few_leaves<kLeaves / 2>(reader, right, slices);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) sums[0][i] = sums[0][i] + right[0][i];
  }
}

template <int kLeaves, int kWidth>
__device__ __forceinline__ void multiply_few_down(FewShared<1, kWidth>& sh, const FewDown& p) {
  FewReader<1, kWidth> reader(sh);
  Tile t;
  for (Walk<kWidth> walk(sh.rows, p.experts); walk.next(t);) {
    float sums[1][kWidth / 2];
    few_leaves<kLeaves>(reader, sums, (p.leaf + 15) / 16);
    reader.end();
    FewPlace place(t.column * kTile, t.row);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      int column = place.row + i / 2 % 2 * 8;
      int64_t pair = place.pair + i / 4 * 8 + i % 2;
      if (pair >= t.end || column >= p.columns) continue;
      if (p.round)
        static_cast<__nv_bfloat16*>(p.out)[pair * p.pitch + column] = __float2bfloat16_rn(sums[0][i]);
      else
        static_cast<float*>(p.out)[pair * p.pitch + column] = sums[0][i];
    }
  }
}

template <int kLeaves, int kWidth>
__global__ void __launch_bounds__(kFewThreads, 2)
    few_down(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap weights, const FewDown p) {
  extern __shared__ uint8_t raw[];
  auto& sh = begin_block<FewShared<1, kWidth>, kWidth, 4>(raw, p.experts, 1);
  if (threadIdx.x < 4 * 32)
    multiply_few_down<kLeaves, kWidth>(sh, p);
  else if (threadIdx.x == 4 * 32)
    bring_in_order<kWidth>(sh, &a, &weights, p);
}

// Host.

template <auto kKernel, class Shared, class... Arguments>
cudaError_t launch_few(int width, int pairs, const Experts& e, cudaStream_t stream, const Arguments&... arguments) {
  constexpr int bytes = sizeof(Shared) + 1024;
  static_assert(2 * (bytes + 1024) <= 228 * 1024);
  int processors;
  if (cudaError_t error = prepare<kKernel>(bytes, 1, &processors)) return error;
  int64_t tiles = std::min<int64_t>(pairs, pairs / width + e.count) * e.across;
  unsigned blocks = static_cast<unsigned>(std::min<int64_t>(tiles, 2 * processors));
  return launch_early(kKernel, blocks, kFewThreads, bytes, stream, arguments...);
}

// f of the width of tiles for as many rows an expert.
template <class F>
cudaError_t by_width(int pairs, int experts, F f) {
  if (pairs <= 4 * experts) return f(std::integral_constant<int, 8>());
  if (pairs <= 8 * experts) return f(std::integral_constant<int, 16>());
  return f(std::integral_constant<int, 32>());
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// As alignkit_experts_gate_up and alignkit_experts_down; each has maps of boxes of its own: alignkit_experts_few_map.

extern "C" int alignkit_experts_few_gate_up(const void* x, int64_t x_pitch, const int64_t* row, const void* weights,
                                            int64_t pitch, const void* each, const int64_t* offsets, int experts, void* h,
                                            void* y, int pairs, int features, int k, cudaStream_t stream) {
  if (experts > kMostExperts) return cudaErrorInvalidValue;
  CUtensorMap map = {};
  if (!each)
    if (cudaError_t e = map_of(&map, {weights, pitch}, Layout::kPlain, int64_t{2} * experts * features, k, kTile)) return e;
  FewGateUp p = {static_cast<const __nv_bfloat16*>(x),
                 x_pitch,
                 row,
                 static_cast<__nv_bfloat16*>(h),
                 static_cast<__nv_bfloat16*>(y),
                 features,
                 k,
                 {static_cast<const CUtensorMap*>(each), 2 * features},
                 {offsets, experts, (features + kTile - 1) / kTile}};
  return by_width(pairs, experts, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    return launch_few<few_gate_up<kWidth>, FewShared<2, kWidth>>(kWidth, pairs, p.experts, stream, map, p);
  });
}

extern "C" int alignkit_experts_few_down(const void* a, int64_t a_pitch, const void* weights, int64_t pitch,
                                         const void* each, const int64_t* offsets, int experts, void* out,
                                         int64_t out_pitch, int round, int pairs, int n, int k, int leaves,
                                         cudaStream_t stream) {
  if (experts > kMostExperts) return cudaErrorInvalidValue;
  CUtensorMap map = {};
  if (!each)
    if (cudaError_t e = map_of(&map, {weights, pitch}, Layout::kPlain, static_cast<int64_t>(experts) * n, k, kTile)) return e;
  FewDown p = {out,
               out_pitch,
               round != 0,
               n,
               k,
               leaves > 1 ? k / leaves : k,
               {static_cast<const CUtensorMap*>(each), n},
               {offsets, experts, (n + kTile - 1) / kTile}};
  return by_width(pairs, experts, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    CUtensorMap rows;
    if (cudaError_t e = map_of(&rows, {a, a_pitch}, Layout::kPlain, pairs, k, kWidth)) return e;
    auto launch = [&](auto number) {
      return launch_few<few_down<decltype(number)::value, kWidth>, FewShared<1, kWidth>>(kWidth, pairs, p.experts, stream,
                                                                                       rows, map, p);
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

// The map of a matrix [rows, k], 128 bytes, for `each`.
extern "C" int alignkit_experts_few_map(void* map, const void* matrix, int64_t pitch, int rows, int k) {
  return write_map(map, {matrix, pitch}, rows, k, kTile);
}
