// Gradients of the experts' matrices: of each [n, k] = a^T . b over the rows of its expert, in their order, one chain per output.
//
// A block takes 128 of n by 256 of k, and of the expert's rows 64 at a time, which are the products' k. A group of four warps
// gathers the rows of one operand into shared memory, and one of its threads has the copy engine bring those of the other, which
// lie in the order of experts; but where these end in the midst of 64, the group copies them too, as there the next expert's
// follow and must be zeros. Two groups multiply 64 of n each.
#include "experts.cuh"

namespace alignkit {
namespace {

constexpr int kLag = 2;  // copies that are on their way when one is waited for

struct GradientsShared {
  Stage stage[kStages];
  Rows rows;
  uint64_t full[kStages], empty[kStages];
};

struct Gradients {
  Matrix gathered, ordered;
  const int64_t* row;  // of the gathered operand, a pair; null: they lie in the order of experts too
  __nv_bfloat16* out;
  int n, k;
  int down, across;  // tiles of a matrix
  Experts experts;
};

struct MatrixTile {
  int expert, row, column;
};

__device__ __forceinline__ bool matrix_tile(const Gradients& p, int i, MatrixTile& t) {
  int each = p.down * p.across, j = i % each;
  t.expert = i / each;
  t.row = j % p.down * kRows;
  t.column = j / p.down * kColumns;
  return t.expert < p.experts.count;
}

// 64 rows of an operand's kWidth columns, as far as there are so many, by threads of eight that take one of the rows each.
template <int kWidth, int kEach>
__device__ __forceinline__ void copy_rows(__nv_bfloat16* to, const Matrix& matrix, const int64_t (&row)[kEach], int at,
                                          int rows, int column, int columns) {
  constexpr int at_once = kStep / kEach;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const __nv_bfloat16* from = static_cast<const __nv_bfloat16*>(matrix.data) + row[i] * matrix.pitch + column;
    bool here = at + i * at_once < rows;
#pragma unroll
    for (int j = 0; j < kWidth; j += kStep)
      copy_vector(to + i * at_once * kStep + j * kStep, from + j, here && column + j < columns);
  }
}

// kGathersA: the gathered operand is a, else b.
template <bool kGathersA>
__device__ __forceinline__ void bring(GradientsShared& sh, const CUtensorMap* map, const Gradients& p) {
  constexpr int vectors = kStep / 8, at_once = 128 / vectors, each = kStep / at_once;
  constexpr int gathered_width = kGathersA ? kRows : kColumns, ordered_width = kGathersA ? kColumns : kRows;
  int thread = threadIdx.x - 2 * 128, lane = thread % 32, vector = thread % vectors * 8, at = thread / vectors;
  // Rows of 128 bytes, whose vectors are swizzled.
  int to = at * kStep + (thread % vectors ^ at % 8) * 8;
  int stage = 0, phase = 0, pending = 0, announced = 0;
  auto announce = [&] {
    shared_written();
    __syncwarp();
    if (lane == 0) barrier_arrive(&sh.full[announced]);
    if (++announced == kStages) announced = 0;
  };
  MatrixTile t;
  for (int tile = blockIdx.x; matrix_tile(p, tile, t); tile += gridDim.x) {
    int first = sh.rows.pair[t.expert], rows = sh.rows.pair[t.expert + 1] - first;
    int gathered_column = kGathersA ? t.row : t.column, ordered_column = kGathersA ? t.column : t.row;
    int gathered_columns = kGathersA ? p.n : p.k, ordered_columns = kGathersA ? p.k : p.n;
    int64_t soon[each];
    auto look = [&](int begin) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        int r = begin + at + i * at_once;
        soon[i] = r >= rows ? 0 : p.row ? p.row[first + r] : first + r;
      }
    };
    look(0);
#pragma unroll 1
    for (int begin = 0; begin < rows; begin += kStep, step<kStages>(stage, phase)) {
      int64_t row[each];
#pragma unroll
      for (int i = 0; i < each; ++i) row[i] = soon[i];
      look(begin + kStep);  // is on its way while these are copied
      barrier_wait(&sh.empty[stage], phase ^ 1);
      Stage& s = sh.stage[stage];
      __nv_bfloat16 *gathered = kGathersA ? s.a : s.b, *ordered = kGathersA ? s.b : s.a;
      bool whole = rows - begin >= kStep;
      if (thread == 0) {
        barrier_expect(&sh.full[stage], whole ? ordered_width * kStep * 2 : 0);
        if (whole)
          for (int j = 0; j < ordered_width; j += kStep)
            copy_box(ordered + j * kStep, map, ordered_column + j, first + begin, &sh.full[stage]);
      }
      copy_rows<gathered_width>(gathered + to, p.gathered, row, at, rows - begin, gathered_column + vector,
                                gathered_columns);
      if (!whole) {
#pragma unroll
        for (int i = 0; i < each; ++i) row[i] = min(first + begin + at + i * at_once, first + rows - 1);
        copy_rows<ordered_width>(ordered + to, p.ordered, row, at, rows - begin, ordered_column + vector,
                                 ordered_columns);
      }
      copies_end();
      if (pending < kLag) {
        ++pending;
      } else {
        copies_wait<kLag>();
        announce();
      }
    }
  }
  copies_wait<0>();
  for (; pending; --pending) announce();
}

__device__ __forceinline__ void multiply_rows(GradientsShared& sh, const Gradients& p) {
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32, stage = 0, phase = 0;
  bool late = group == 1, first = true;
  uint64_t a0 = operand<true>(sh.stage[0].a + group * kGroupRows * kStep), b0 = operand<true>(sh.stage[0].b);
  float sums[128];
  MatrixTile t;
  for (int tile = blockIdx.x; matrix_tile(p, tile, t); tile += gridDim.x) {
    int steps = (sh.rows.pair[t.expert + 1] - sh.rows.pair[t.expert] + kStep - 1) / kStep;
    Place place(p.n, t.row + group * kGroupRows, 0);
    __nv_bfloat16* out = p.out + static_cast<int64_t>(t.expert) * p.n * p.k;
    if (steps == 0) {
      float zeros[128] = {};
      store_rows(zeros, place, out, p.k, p.k, t.column);
      continue;
    }
    if (first && late) named_barrier_sync(1, 256);
    int before = 0;
#pragma unroll 1
    for (int k = 0; k < steps; ++k) {
      barrier_wait(&sh.full[stage], phase);
      uint64_t a = a0 + stage * (kStageBytes >> 4), b = b0 + stage * (kStageBytes >> 4);
      products_begin();
#pragma unroll
      for (int j = 0; j < kStep / 16; ++j)
        multiply<true, true>(sums, a + j * kNext<true>, b + j * kNext<true>, k + j > 0);
      products_end();
      if (first && !late && k == min(kBehind, steps) - 1) named_barrier_arrive(1, 256);
      if (k > 0) {
        products_wait<1>();
        if (lane == 0) barrier_arrive(&sh.empty[before]);
      }
      before = stage;
      step<kStages>(stage, phase);
    }
    products_wait<0>();
    products_taken(sums);
    if (lane == 0) barrier_arrive(&sh.empty[before]);
    first = false;
    store_rows(sums, place, out, p.k, p.k, t.column);
  }
}

template <bool kGathersA>
__global__ void __launch_bounds__(kThreads, 1)
    matrix_gradients(const __grid_constant__ CUtensorMap ordered, const Gradients p) {
  extern __shared__ uint8_t raw[];
  auto& sh = begin_block<GradientsShared>(raw, p.experts, 1 + 4);  // the copy engine's bytes, and warps that gather
  if (threadIdx.x / 128 == 2) {
    registers_down<56>();
    bring<kGathersA>(sh, &ordered, p);
  } else {
    registers_up<224>();
    multiply_rows(sh, p);
  }
}

template <bool kGathersA>
cudaError_t launch_gradients(const Gradients& p, int pairs, cudaStream_t stream) {
  CUtensorMap map;
  if (cudaError_t e = map_of(&map, p.ordered, Layout::kTransposed, kGathersA ? p.k : p.n, pairs, kStep)) return e;
  constexpr auto kernel = matrix_gradients<kGathersA>;
  constexpr int bytes = sizeof(GradientsShared) + 1024;
  int processors;
  if (cudaError_t e = prepare<kernel>(bytes, 1, &processors)) return e;
  int64_t tiles = int64_t{p.experts.count} * p.down * p.across;
  unsigned blocks = static_cast<unsigned>(std::min<int64_t>(tiles, processors));
  return launch_early(kernel, blocks, kThreads, bytes, stream, map, p);
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// out [experts, n, k] = a^T . b over the pairs of each expert, rounded; 0 where it has none. Of a, if `gathers_a`, else of b, the
// rows are `row` of them, a pair, or, if it is null, lie in the order of pairs as those of the other do, which has `pairs` rows
// or more. n and k are multiples of 8. Returns a cudaError_t.
extern "C" int alignkit_experts_gradients(const void* a, int64_t a_pitch, const void* b, int64_t b_pitch, int gathers_a,
                                          const int64_t* row, const int64_t* offsets, int experts, void* out, int pairs,
                                          int n, int k, cudaStream_t stream) {
  if (experts > kMostExperts) return cudaErrorInvalidValue;
  Matrix of_a{a, a_pitch}, of_b{b, b_pitch};
  int across = (k + kColumns - 1) / kColumns;
  Gradients p = {gathers_a ? of_a : of_b,
                 gathers_a ? of_b : of_a,
                 row,
                 static_cast<__nv_bfloat16*>(out),
                 n,
                 k,
                 (n + kRows - 1) / kRows,
                 across,
                 {offsets, experts, across}};
  return gathers_a ? launch_gradients<true>(p, pairs, stream) : launch_gradients<false>(p, pairs, stream);
}
