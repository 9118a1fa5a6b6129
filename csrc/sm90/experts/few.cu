// As down.cu for few rows an expert, as fast as its matrix can be read.
//
// A matrix's rows are rows to the tensor core, 64 to a tile; those that chose the expert, up to kWidth, are its columns. One
// warp brings operands to shared memory, far ahead and through the ends of tiles, four multiply.
#include <type_traits>

#include "experts.cuh"

namespace alignkit {
namespace {

constexpr int kTile = 64;  // rows of a matrix
constexpr int kFewThreads = 5 * 32;

template <int kWidth>
struct FewStage {
  __nv_bfloat16 weight[kTile * kStep];
  __nv_bfloat16 row[kWidth * kStep];
};

// Two blocks share a multiprocessor.
template <int kWidth>
struct FewShared {
  static constexpr int kDepth = 100 * 1024 / sizeof(FewStage<kWidth>);
  FewStage<kWidth> stage[kDepth];
  Rows rows;
  uint64_t full[kDepth], empty[kDepth];
};

// Where the warps that multiply are in the ring.
template <int kWidth>
struct FewReader {
  using Sh = FewShared<kWidth>;
  static constexpr int kSize = sizeof(FewStage<kWidth>) >> 4, kSlices = kStep / 16;
  Sh& sh;
  uint64_t weight, row;  // operands of the first stage
  int stage = 0, phase = 0, slice = 0;

  __device__ FewReader(Sh& sh) : sh(sh), weight(operand<false>(sh.stage[0].weight)), row(operand<false>(sh.stage[0].row)) {}

  // A chain over the next `slices` of 16.
  __device__ __forceinline__ void chain(float (&sums)[kWidth / 2], int slices) {
#pragma unroll 1
    for (int i = 0; i < slices; ++i) {
      if (slice == 0) barrier_wait(&sh.full[stage], phase);
      int at = stage * kSize + slice * kNext<false>;
      products_begin();
      multiply<false, false>(sums, weight + at, row + at, i > 0);
      products_end();
      if (++slice == kSlices) {
        products_wait<0>();
        next_stage();
      }
    }
    products_wait<0>();
    products_taken(sums);
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

struct FewDown {
  void* out;
  int64_t pitch;
  bool round;
  int columns, k, leaf;
  Matrices weights;
  Experts experts;
};

template <int kWidth>
__device__ __forceinline__ void copy_few(FewShared<kWidth>& sh, const CUtensorMap* a, const CUtensorMap* all,
                                         const FewDown& p) {
  constexpr int depth = FewShared<kWidth>::kDepth;
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
      copy_box(s.weight, map, k, column, &sh.full[stage]);
      copy_box(s.row, a, k, t.row, &sh.full[stage]);  // of rows of the next expert nothing is stored
    }
  }
}

// The balanced tree over the next kLeaves leaves.
template <int kLeaves, int kWidth>
__device__ __forceinline__ void few_leaves(FewReader<kWidth>& reader, float (&sums)[kWidth / 2], int slices) {
  if constexpr (kLeaves == 1) {
    reader.chain(sums, slices);
  } else {
    few_leaves<kLeaves / 2>(reader, sums, slices);
    float right[kWidth / 2];
    few_leaves<kLeaves / 2>(reader, right, slices);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) sums[i] = sums[i] + right[i];
  }
}

template <int kLeaves, int kWidth>
__device__ __forceinline__ void multiply_few_down(FewShared<kWidth>& sh, const FewDown& p) {
  FewReader<kWidth> reader(sh);
  Tile t;
  for (Walk<kWidth> walk(sh.rows, p.experts); walk.next(t);) {
    float sums[kWidth / 2];
    few_leaves<kLeaves>(reader, sums, (p.leaf + 15) / 16);
    reader.end();
    FewPlace place(t.column * kTile, t.row);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      int column = place.row + i / 2 % 2 * 8;
      int64_t pair = place.pair + i / 4 * 8 + i % 2;
      if (pair >= t.end || column >= p.columns) continue;
      if (p.round)
        static_cast<__nv_bfloat16*>(p.out)[pair * p.pitch + column] = __float2bfloat16_rn(sums[i]);
      else
        static_cast<float*>(p.out)[pair * p.pitch + column] = sums[i];
    }
  }
}

template <int kLeaves, int kWidth>
__global__ void __launch_bounds__(kFewThreads, 2)
    few_down(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap weights, const FewDown p) {
  extern __shared__ uint8_t raw[];
  auto& sh = begin_block<FewShared<kWidth>, kWidth, 4>(raw, p.experts, 1);
  if (threadIdx.x < 4 * 32)
    multiply_few_down<kLeaves, kWidth>(sh, p);
  else if (threadIdx.x == 4 * 32)
    copy_few<kWidth>(sh, &a, &weights, p);
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

// As alignkit_experts_down; the maps of `each` are of alignkit_experts_few_map.
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
      return launch_few<few_down<decltype(number)::value, kWidth>, FewShared<kWidth>>(kWidth, pairs, p.experts, stream,
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
