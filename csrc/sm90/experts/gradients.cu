// Grouped GEMM for the weight gradients of the experts: dW [n, k] = a^T b over each expert's rows.
//
// Tile: 128 of n by 256 of k of one expert. The expert's rows are the GEMM's reduction dimension, 64 per step.
//
// Warp specialization: a producer warpgroup gathers the rows of one operand with cp.async. One of its threads loads the
// other operand, which lies in expert order, with TMA. In an expert's last step of fewer than 64 rows, the warpgroup
// copies this operand too: the following rows belong to the next expert and must read as zero. Two consumer warpgroups
// multiply 64 of n each.
//
// Order of summation (docs/contract.md, "Mixture of experts"): each output is one chain over the expert's rows, in
// their order.
//
// Launch: one persistent CTA of 384 threads per SM.
//
// Called by alignkit/ops/moe_experts/cuda_backend.py. Tile and launch shape change no bits.
#include "experts.cuh"

namespace alignkit {
namespace {

constexpr int kLag = 2;  // schedule: cp.async groups in flight when the producer waits for one

struct GradientsShared {
  Stage stage[kStages];
  ExpertTable table;
  uint64_t full[kStages], empty[kStages];
};

struct Gradients {
  Matrix gathered, ordered;
  const int64_t* row;  // row of the gathered operand for each pair; null: it lies in expert order too
  __nv_bfloat16* out;
  int n, k;
  int row_tiles, column_tiles;  // tiles of one matrix
  Experts experts;
};

struct MatrixTile {
  int expert, row, column;
};

// Set t to tile i of all matrices; return whether it exists.
__device__ __forceinline__ bool matrix_tile(const Gradients& p, int i, MatrixTile& t) {
  int per_matrix = p.row_tiles * p.column_tiles, j = i % per_matrix;
  t.expert = i / per_matrix;
  t.row = j % p.row_tiles * kRows;
  t.column = j / p.row_tiles * kColumns;
  return t.expert < p.experts.count;
}

// Copy 64 rows of kWidth columns with cp.async; rows from `rows` on and columns from `columns` on become zero. Eight
// threads share a row.
template <int kWidth, int kPerThread>
__device__ __forceinline__ void copy_rows(__nv_bfloat16* dst, const Matrix& matrix, const int64_t (&row)[kPerThread],
                                          int first_row, int rows, int column, int columns) {
  constexpr int rows_at_once = kStep / kPerThread;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const __nv_bfloat16* src = static_cast<const __nv_bfloat16*>(matrix.data) + row[i] * matrix.pitch + column;
    bool valid = first_row + i * rows_at_once < rows;
#pragma unroll
    for (int j = 0; j < kWidth; j += kStep)
      cp_async_zfill(dst + i * rows_at_once * kStep + j * kStep, src + j, valid && column + j < columns);
  }
}

// Producer warpgroup. kGathersA: the gathered operand is a, otherwise b.
template <bool kGathersA>
__device__ __forceinline__ void load_operands(GradientsShared& sh, const CUtensorMap* map, const Gradients& p) {
  constexpr int vectors = kStep / 8, rows_at_once = 128 / vectors, per_thread = kStep / rows_at_once;
  constexpr int gathered_width = kGathersA ? kRows : kColumns, ordered_width = kGathersA ? kColumns : kRows;
  int thread = threadIdx.x - 2 * 128, lane = thread % 32, vector = thread % vectors * 8, thread_row = thread / vectors;
  // 128-byte rows, whose vectors are swizzled.
  int offset = thread_row * kStep + (thread % vectors ^ thread_row % 8) * 8;
  int stage = 0, phase = 0, pending = 0, signal_stage = 0;
  auto signal_full = [&] {
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&sh.full[signal_stage]);
    if (++signal_stage == kStages) signal_stage = 0;
  };
  MatrixTile t;
  for (int tile = blockIdx.x; matrix_tile(p, tile, t); tile += gridDim.x) {
    int first = sh.table.pair[t.expert], rows = sh.table.pair[t.expert + 1] - first;
    int gathered_column = kGathersA ? t.row : t.column, ordered_column = kGathersA ? t.column : t.row;
    int gathered_columns = kGathersA ? p.n : p.k, ordered_columns = kGathersA ? p.k : p.n;
    int64_t next_row[per_thread];
    auto prefetch_rows = [&](int begin) {
#pragma unroll
      for (int i = 0; i < per_thread; ++i) {
        int r = begin + thread_row + i * rows_at_once;
        next_row[i] = r >= rows ? 0 : p.row ? p.row[first + r] : first + r;
      }
    };
    prefetch_rows(0);
#pragma unroll 1
    for (int begin = 0; begin < rows; begin += kStep, advance<kStages>(stage, phase)) {
      int64_t row[per_thread];
#pragma unroll
      for (int i = 0; i < per_thread; ++i) row[i] = next_row[i];
      prefetch_rows(begin + kStep);  // in flight while the current rows are copied
      mbarrier_wait(&sh.empty[stage], phase ^ 1);
      Stage& s = sh.stage[stage];
      __nv_bfloat16 *gathered = kGathersA ? s.a : s.b, *ordered = kGathersA ? s.b : s.a;
      bool complete = rows - begin >= kStep;
      if (thread == 0) {
        mbarrier_expect_tx(&sh.full[stage], complete ? ordered_width * kStep * 2 : 0);
        if (complete)
          for (int j = 0; j < ordered_width; j += kStep)
            tma_load(ordered + j * kStep, map, ordered_column + j, first + begin, &sh.full[stage]);
      }
      copy_rows<gathered_width>(gathered + offset, p.gathered, row, thread_row, rows - begin, gathered_column + vector,
                                gathered_columns);
      if (!complete) {
#pragma unroll
        for (int i = 0; i < per_thread; ++i)
          row[i] = min(first + begin + thread_row + i * rows_at_once, first + rows - 1);
        copy_rows<ordered_width>(ordered + offset, p.ordered, row, thread_row, rows - begin, ordered_column + vector,
                                 ordered_columns);
      }
      cp_async_commit();
      if (pending < kLag) {
        ++pending;
      } else {
        cp_async_wait<kLag>();
        signal_full();
      }
    }
  }
  cp_async_wait<0>();
  for (; pending; --pending) signal_full();
}

// Consumer warpgroup: multiplies 64 of n of each tile.
__device__ __forceinline__ void compute_gradients(GradientsShared& sh, const Gradients& p) {
  Mainloop<true, true, 1, GradientsShared> mainloop{sh};
  int stage = 0, phase = 0;
  bool first = true;
  float sums[128];
  MatrixTile t;
  for (int tile = blockIdx.x; matrix_tile(p, tile, t); tile += gridDim.x) {
    int steps = (sh.table.pair[t.expert + 1] - sh.table.pair[t.expert] + kStep - 1) / kStep;
    Coords place(p.n, t.row + mainloop.group * kGroupRows, 0);
    __nv_bfloat16* out = p.out + static_cast<int64_t>(t.expert) * p.n * p.k;
    if (steps == 0) {
      float zeros[128] = {};
      store_rows(zeros, place, out, p.k, p.k, t.column);
      continue;
    }
    auto next = mainloop.run(sums, steps, stage, phase, first);
    stage = next.stage, phase = next.phase, first = false;
    store_rows(sums, place, out, p.k, p.k, t.column);
  }
}

// The weight gradient kernel; see the top of the file.
template <bool kGathersA>
__global__ void __launch_bounds__(kThreads, 1)
    matrix_gradients(const __grid_constant__ CUtensorMap ordered, const Gradients p) {
  extern __shared__ uint8_t raw[];
  auto& sh = prologue<GradientsShared>(raw, p.experts, 1 + 4);  // arrivals: TMA, and four gathering warps
  if (threadIdx.x / 128 == 2) {
    setmaxnreg_dec<56>();
    load_operands<kGathersA>(sh, &ordered, p);
  } else {
    setmaxnreg_inc<224>();
    compute_gradients(sh, p);
  }
}

template <bool kGathersA>
cudaError_t launch_gradients(const Gradients& p, int pairs, cudaStream_t stream) {
  CUtensorMap map;
  if (cudaError_t e = make_tensor_map(&map, p.ordered, Layout::kTransposed, kGathersA ? p.k : p.n, pairs, kStep))
    return e;
  constexpr auto kernel = matrix_gradients<kGathersA>;
  constexpr int bytes = sizeof(GradientsShared) + 1024;
  int sms;
  if (cudaError_t e = prepare<kernel>(bytes, 1, &sms)) return e;
  int64_t tiles = int64_t{p.experts.count} * p.row_tiles * p.column_tiles;
  unsigned blocks = static_cast<unsigned>(std::min<int64_t>(tiles, sms));
  return launch_pdl(kernel, blocks, kThreads, bytes, stream, map, p);
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// Compute out [experts, n, k] = a^T b over each expert's pairs, rounded to bf16; 0 for an expert without pairs.
// Operand a, if `gathers_a`, otherwise b, has its rows selected by `row`, one per pair. If `row` is null, it lies in
// expert order like the other operand, which has at least `pairs` rows. n and k are multiples of 8. Not checked
// here: gathered rows start at multiples of 16 bytes (`gradients_rejects` in cuda_backend.py). Returns a cudaError_t.
extern "C" int alignkit_experts_gradients(const void* a, int64_t a_pitch, const void* b, int64_t b_pitch, int gathers_a,
                                          const int64_t* row, const int64_t* offsets, int experts, void* out, int pairs,
                                          int n, int k, cudaStream_t stream) {
  if (experts < 1 || experts > kMaxExperts || pairs < 1 || n < 1 || k < 1 || (n | k) % 8) return cudaErrorInvalidValue;
  Matrix of_a{a, a_pitch}, of_b{b, b_pitch};
  int column_tiles = (k + kColumns - 1) / kColumns;
  Gradients p = {gathers_a ? of_a : of_b,
                 gathers_a ? of_b : of_a,
                 row,
                 static_cast<__nv_bfloat16*>(out),
                 n,
                 k,
                 (n + kRows - 1) / kRows,
                 column_tiles,
                 {offsets, experts, column_tiles}};
  return gathers_a ? launch_gradients<true>(p, pairs, stream) : launch_gradients<false>(p, pairs, stream);
}

ALIGNKIT_FUNCTION(alignkit_experts_gradients)
