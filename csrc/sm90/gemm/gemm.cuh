// GEMM a [m, k] . b [n, k]^T of bf16 matrices, fp32 accumulators, with an epilogue fused on the accumulator registers.
// Used by head/; its tile shape, operands and launch helpers also by skinny*.cu and experts/.
//
// - Tile: a cluster of two CTAs computes 256 x 256 outputs, each CTA 128 of the rows.
// - Warp specialization: one thread of a producer warpgroup issues TMA loads into a 4-stage pipeline. Each CTA loads
//   half of b's tile and multicasts it to both. Two consumer warpgroups compute 64 rows by 256 columns each with wgmma.
//   The second starts kStagger steps of k later, so that one runs its epilogue while the other uses the tensor core.
// - Order of summation (docs/contract.md, "On Hopper GPUs"): each output is one chain over ascending k, in steps of 16.
//   A chain may pause at multiples of 16 only. Tile, stages and launch shape change no bits.
// - Launch: persistent clusters, at most as many as the device holds at once; 384 threads per CTA; PDL.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../../interface.h"
#include "../ptx/cluster.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/pdl.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "alignkit/runtime/kernels.h"

namespace alignkit {
namespace {

// kRows, kColumns, kClusterSize and kThreads are sizes that the code assumes. kStages may be lowered: the stages fill
// shared memory. kBand and kStagger are free.
constexpr int kRows = 128;         // schedule: tile rows per CTA
constexpr int kGroupRows = 64;     // hardware: rows per warpgroup, the M of wgmma
constexpr int kColumns = 256;      // schedule: tile columns per CTA; a multiple of VOCAB_TILE for head/linear_logp.cu
constexpr int kStages = 4;         // schedule: TMA pipeline depth
constexpr int kClusterSize = 2;    // schedule: CTAs per cluster
constexpr int kBand = 16;          // schedule: cluster tiles per rasterization band (4096 rows), whose rows stay in L2
constexpr int kStagger = 2;        // schedule: steps of k by which the second consumer warpgroup starts later
constexpr int kThreads = 3 * 128;  // schedule: two consumer warpgroups and the producer

// Memory layout of an operand: kPlain is K-major (rows of k), kTransposed is MN-major (one row per k).
enum class Layout { kPlain, kTransposed };

struct Stage {
  __nv_bfloat16 a[kRows * kStep];
  __nv_bfloat16 b[kColumns * kStep];
};

struct Shared {
  Stage stage[kStages];
  uint64_t full[kStages], empty[kStages];
};

constexpr int kStageBytes = sizeof(Stage);
constexpr int kSharedBytes = sizeof(Shared) + 1024;  // slack for 1024-byte alignment

// Number of valid rows, known on the device only: the first *count rows of a batch are valid (null: all), and `before`
// rows of the batch precede this launch's.
struct Count {
  const int* count;
  int before;

  __device__ int valid(int rows) const { return count ? max(min(*count - before, rows), 0) : rows; }
};

// Head start of a kernel that overlaps its predecessor: the first `early` clusters compute `extra` tiles each before
// the others start, because the predecessor still occupies their SMs.
struct Lead {
  int early, extra;
};

struct Shape {
  int m, n, k;
  Count count;  // valid rows of m, or of k if a is transposed
  Lead lead;
};

// Tile scheduler of a persistent cluster: bands of kBand tile rows, column by column within a band.
template <Layout kA>
struct Tiles {
  int tile_rows, tile_columns, valid_tile_rows, steps;
  int first;  // this cluster's first tile

  __device__ Tiles(const Shape& s) {
    int cluster = blockIdx.x / kClusterSize;
    first = s.lead.extra > 0 && cluster < s.lead.early ? cluster : s.lead.early * s.lead.extra + cluster;
    tile_rows = (s.m + kClusterSize * kRows - 1) / (kClusterSize * kRows);
    tile_columns = (s.n + kColumns - 1) / kColumns;
    valid_tile_rows = kA == Layout::kPlain
                          ? (s.count.valid(s.m) + kClusterSize * kRows - 1) / (kClusterSize * kRows)
                          : tile_rows;
    steps = ((kA == Layout::kPlain ? s.k : s.count.valid(s.k)) + kStep - 1) / kStep;
  }

  // The cluster's tile after tile i; tiles before `common` belong to the early clusters alone.
  __device__ int next(const Shape& s, int i) const {
    int common = s.lead.early * s.lead.extra;
    if (i >= common) return i + gridDim.x / kClusterSize;
    return i + s.lead.early < common ? i + s.lead.early : common + blockIdx.x / kClusterSize;
  }

  // Set the first row and column of cluster tile i; return false if the tile has no valid rows or no k.
  __device__ bool at(int i, int& row, int& column) const {
    int first = i / (kBand * tile_columns) * kBand, band = min(kBand, tile_rows - first), j = i - first * tile_columns;
    int r = first + j % band;
    row = r * kClusterSize * kRows;
    column = j / band * kColumns;
    return r < valid_tile_rows && steps > 0;
  }
};

// Producer: load the operands of all tiles, and prefetch the epilogue's inputs to L2.
template <Layout kA, Layout kB, class Epilogue>
__device__ void load_tiles(Shared& sh, const CUtensorMap* a, const CUtensorMap* b, const Shape& s,
                           const Epilogue& epilogue, int rank) {
  constexpr uint16_t all = (1 << kClusterSize) - 1;
  constexpr int half = kColumns / kClusterSize, box = 64;  // box: width of a transposed operand's TMA box
  Tiles<kA> tiles(s);
  int stage = 0, phase = 0;
  int prefetch_k = max(tiles.steps - 8, 0) * kStep;  // early enough before the tile's end to hide memory latency
  for (int i = tiles.first; i < tiles.tile_rows * tiles.tile_columns; i = tiles.next(s, i)) {
    int row, column, next_row, next_column;
    if (!tiles.at(i, row, column)) continue;
    row += rank * kRows;
    if (Epilogue::kResumes && i == tiles.first) epilogue.prefetch(s, row, column);
    column += rank * half;
#pragma unroll 1
    for (int k = 0; k < tiles.steps * kStep; k += kStep, advance<kStages>(stage, phase)) {
      if (k == prefetch_k && tiles.at(Epilogue::kResumes ? tiles.next(s, i) : i, next_row, next_column))
        epilogue.prefetch(s, next_row + rank * kRows, next_column);
      mbarrier_wait(&sh.empty[stage], phase ^ 1);
      uint64_t* full = &sh.full[stage];
      mbarrier_expect_tx(full, kStageBytes);
      __nv_bfloat16 *to_a = sh.stage[stage].a, *to_b = sh.stage[stage].b + rank * half * kStep;
      if (kA == Layout::kPlain)
        tma_load(to_a, a, k, row, full);
      else
        for (int j = 0; j < kRows; j += box) tma_load(to_a + j * kStep, a, row + j, k, full);
      if (kB == Layout::kPlain)
        tma_load_multicast(all, to_b, b, k, column, full);
      else
        for (int j = 0; j < half; j += box) tma_load_multicast(all, to_b + j * kStep, b, column + j, k, full);
    }
  }
}

// Coordinates of a thread's accumulators: rows `row` and row + 8, columns `column` + 8 j + e.
struct Coords {
  int row, column, lane;
  int quad;       // first column in the layout of quad_of
  bool valid[2];  // the row is below m

  __device__ Coords(int m, int group_row, int first_column) {
    int thread = threadIdx.x % 128;
    lane = thread % 32;
    row = group_row + thread / 32 * 16 + lane / 4;
    column = first_column + 2 * (lane % 4);
    quad = first_column + lane / 2 % 2 * 4 + lane % 2 * 8;
    valid[0] = row < m;
    valid[1] = row + 8 < m;
  }
};

// quad_of: lanes 2 i and 2 i + 1 exchange accumulators so that each holds float4s of four adjacent columns (16 bytes).
// Quad i of a thread's 32 is in row `row` + i / 16 * 8 and starts at column `quad` + i % 16 * 16.
constexpr int kQuads = 32;  // hardware: float4s in the 128 accumulators of an m64n256 fragment

__device__ __forceinline__ float4 quad_of(const float (&sums)[128], const Coords& p, int i) {
  bool odd = p.lane & 1;
  int first = i % 16 * 8 + i / 16 * 2;
  float a = sums[first], b = sums[first + 1], c = sums[first + 4], d = sums[first + 5];
  float x = __shfl_xor_sync(~0u, odd ? a : c, 1), y = __shfl_xor_sync(~0u, odd ? b : d, 1);
  return odd ? make_float4(x, y, c, d) : make_float4(a, b, x, y);
}

// The inverse of quad_of: write quad i back to the accumulators.
__device__ __forceinline__ void set_quad(float (&sums)[128], const Coords& p, int i, float4 v) {
  bool odd = p.lane & 1;
  int first = i % 16 * 8 + i / 16 * 2;
  float a = v.x, b = v.y, c = v.z, d = v.w;
  float x = __shfl_xor_sync(~0u, odd ? a : c, 1), y = __shfl_xor_sync(~0u, odd ? b : d, 1);
  sums[first] = odd ? x : a;
  sums[first + 1] = odd ? y : b;
  sums[first + 4] = odd ? c : x;
  sums[first + 5] = odd ? d : y;
}

// Round a thread's accumulators of 2 kCount columns to bf16 and store them to out [m, width]; width and pitch (elements
// between rows) are multiples of 8. Four lanes transpose so that each stores eight adjacent columns, 16 bytes.
template <int kCount>
__device__ __forceinline__ void store_rows(const float (&sums)[kCount], const Coords& p, __nv_bfloat16* out,
                                           int64_t pitch, int64_t width, int first_column) {
  bool odd = p.lane & 1, high = p.lane & 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    __nv_bfloat16* row = out + (p.row + 8 * h) * pitch + first_column;
#pragma unroll
    for (int i = 0; i < kCount / 16; ++i) {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int first = 16 * i + 4 * j + 2 * h;
        __nv_bfloat162 pair = __floats2bfloat162_rn(sums[first], sums[first + 1]);
        w[j] = *reinterpret_cast<uint32_t*>(&pair);
      }
      uint32_t x = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), y = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
      (odd ? w[0] : w[1]) = x;
      (odd ? w[2] : w[3]) = y;
      x = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2), y = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
      (high ? w[0] : w[2]) = x;
      (high ? w[1] : w[3]) = y;
      int column = 32 * i + 8 * (p.lane % 4);
      if (p.valid[h] && first_column + column < width)
        *reinterpret_cast<uint4*>(row + column) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

// Interface of an Epilogue:
// - begin(shape, sums, warpgroup's first row, first column): runs before the mainloop and returns a State for run;
// - kResumes: the chains continue from `sums`, which begin sets;
// - run(the same, state): runs after the mainloop;
// - skip(shape, warpgroup's first row, first column): replaces all of it for a tile without valid rows or k;
// - prefetch(shape, CTA's first row, first column): prefetches to L2 the inputs of begin if kResumes, else of run.
//
// FromZero: base of epilogues whose chains start from zero.
struct FromZero {
  static constexpr bool kResumes = false;
  struct State {};
  __device__ State begin(const Shape&, float (&)[128], int, int) const { return {}; }
  __device__ void prefetch(const Shape&, int, int) const {}
};

// Mainloop of a consumer warpgroup over the stages that a producer fills, for experts/ too. kCtas: the CTAs of a
// cluster, whose producers wait until a stage is empty. Shared has `stage`, `full` and `empty`.
template <bool kATransposed, bool kBTransposed, int kCtas, class Shared>
struct Mainloop {
  struct Position {
    int stage, phase;
  };

  Shared& sh;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // shuffled: known to be warp-uniform
  uint64_t a0 = smem_descriptor<kATransposed>(sh.stage[0].a + group * kGroupRows * kStep);
  uint64_t b0 = smem_descriptor<kBTransposed>(sh.stage[0].b);

  __device__ __forceinline__ void release(int stage) const {
    if constexpr (kCtas == 1) {
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&sh.empty[stage]);
    } else {
      if (threadIdx.x % 32 < kCtas) mbarrier_arrive(&sh.empty[stage], threadIdx.x % 32);
    }
  }

  // Compute a tile's chains over `steps` steps of k, at least 1, from stage `stage` on, and return the next stage. The
  // chains start from zero, or from `sums` if kResumes. `first`: the CTA's first tile, in which the groups stagger.
  // The caller holds stage and phase in variables of their own, because members get other registers.
  template <bool kResumes = false>
  __device__ __forceinline__ Position run(float (&sums)[128], int steps, int stage, int phase, bool first) const {
    bool second = group == 1;
    if (kResumes) warpgroup_fence_operand(sums);
    if (kStagger && first && second) named_barrier_sync(1, 256);
    int previous = 0;
#pragma unroll 1
    for (int k = 0; k < steps; ++k) {
      mbarrier_wait(&sh.full[stage], phase);
      uint64_t a = a0 + stage * (kStageBytes >> 4), b = b0 + stage * (kStageBytes >> 4);
      warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kStep / 16; ++j)
        wgmma<kATransposed, kBTransposed>(sums, a + j * kDescriptorStep<kATransposed>,
                                          b + j * kDescriptorStep<kBTransposed>, kResumes || k + j > 0);
      warpgroup_commit();
      if (first && !second && k == min(kStagger, steps) - 1) named_barrier_arrive(1, 256);
      if (k > 0) {
        warpgroup_wait<1>();
        release(previous);
      }
      previous = stage;
      advance<kStages>(stage, phase);
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    release(previous);
    return {stage, phase};
  }
};

// Consumer warpgroup: mainloop and epilogue of all tiles.
template <Layout kA, Layout kB, class Epilogue>
__device__ void mma_tiles(Shared& sh, const Shape& s, const Epilogue& epilogue, int rank) {
  Tiles<kA> tiles(s);
  Mainloop<kA == Layout::kTransposed, kB == Layout::kTransposed, kClusterSize, Shared> mainloop{sh};
  int group_row = mainloop.group * kGroupRows, phase = 0, stage = 0;
  bool first = true;
  float sums[128];
  for (int i = tiles.first; i < tiles.tile_rows * tiles.tile_columns; i = tiles.next(s, i)) {
    int row, column;
    bool valid = tiles.at(i, row, column);
    row += rank * kRows + group_row;
    if (!valid) {
      epilogue.skip(s, row, column);
      continue;
    }
    auto state = epilogue.begin(s, sums, row, column);
    auto next = mainloop.template run<Epilogue::kResumes>(sums, tiles.steps, stage, phase, first);
    stage = next.stage, phase = next.phase, first = false;
    epilogue.run(s, sums, row, column, state);
  }
}

// When a kernel may start its work: after its predecessor in the stream has completed, or overlapping it. With kOverlap
// the predecessor must itself have waited for the kernel before it. Either way this kernel ends after its predecessor.
enum class Order { kAfter, kOverlap };

// The kernel: see the top of this file.
template <Layout kA, Layout kB, Order kOrder, class Epilogue>
__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1)
    gemm(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const Shape s,
         const Epilogue epilogue) {
  extern __shared__ uint8_t raw[];
  Shared& sh = *reinterpret_cast<Shared*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  int rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&sh.full[i], 1);
      mbarrier_init(&sh.empty[i], 8 * kClusterSize);  // consumer warps of both CTAs
    }
    fence_mbarrier_init();
  }
  cluster_sync();
  if (kOrder == Order::kAfter) griddep_wait();
  griddep_launch_dependents();
  if (threadIdx.x / 128 == 2) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 2 * 128) load_tiles<kA, kB>(sh, &a, &b, s, epilogue, rank);
  } else {
    setmaxnreg_inc<232>();
    mma_tiles<kA, kB>(sh, s, epilogue, rank);
  }
  __syncwarp();
  cluster_sync();  // do not exit while the other CTA may still multicast or arrive here
  if (kOrder == Order::kOverlap) griddep_wait();
}

// Host.

// A bf16 matrix with `pitch` elements between rows of memory.
struct Matrix {
  const void* data;
  int64_t pitch;
};

// Encode the tensor map of a matrix [rows, k] with boxes of `box_rows` rows by 64 of k.
inline cudaError_t make_tensor_map(CUtensorMap* map, const Matrix& matrix, Layout layout, int64_t rows, int64_t k,
                                   int box_rows) {
  if (!tensor_map_encoder()) return cudaErrorNotSupported;
  bool plain = layout == Layout::kPlain;
  cuuint64_t size[2] = {static_cast<cuuint64_t>(plain ? k : rows), static_cast<cuuint64_t>(plain ? rows : k)};
  cuuint64_t stride[1] = {static_cast<cuuint64_t>(matrix.pitch) * 2};
  cuuint32_t box_k = kStep, box_mn = box_rows, one[2] = {1, 1};
  cuuint32_t box[2] = {plain ? box_k : box_mn, plain ? box_mn : box_k};
  CUresult result = tensor_map_encoder()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix.data), size,
                                         stride, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Opt the kernel in to `bytes` of dynamic shared memory, and set *max_clusters to the number of clusters that the
// device holds at once, or to its number of SMs for a kernel without clusters (cluster_size 1). The result is cached
// per thread for the device used last.
template <auto kKernel>
cudaError_t prepare(int bytes, int cluster_size, int* max_clusters) {
  static thread_local int device_prepared = -1, cached = 0;
  int device;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (device_prepared != device) {
    if (cudaError_t e = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
    cudaLaunchConfig_t config = {};
    config.gridDim = cluster_size;
    config.blockDim = kThreads;
    config.dynamicSmemBytes = bytes;
    if (cudaError_t e = cluster_size == 1 ? cudaDeviceGetAttribute(&cached, cudaDevAttrMultiProcessorCount, device)
                                          : cudaOccupancyMaxActiveClusters(&cached, kKernel, &config))
      return e;
    device_prepared = device;
  }
  *max_clusters = cached;
  return cudaSuccess;
}

inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
inline int64_t cluster_tiles(const Shape& s) { return ceil_div(s.m, kClusterSize * kRows) * ceil_div(s.n, kColumns); }

// Choose the head start of a GEMM that overlaps `before`. Clusters idle in the last wave of `before` get as many extra
// tiles as finish both GEMMs soonest; the unit of time is one step of k.
inline Lead choose_lead(const Shape& before, const Shape& s, int clusters) {
  int64_t tiles = cluster_tiles(s), idle = (clusters - cluster_tiles(before) % clusters) % clusters;
  int64_t lead = ceil_div(before.k, kStep), tile_steps = ceil_div(s.k, kStep), soonest = INT64_MAX;
  Lead best = {};
  for (int64_t extra = 0; idle * extra <= tiles && (extra - 1) * tile_steps < lead; ++extra) {
    int64_t end = std::max(lead, extra * tile_steps) + ceil_div(tiles - idle * extra, clusters) * tile_steps;
    if (end < soonest) best = {static_cast<int>(idle), static_cast<int>(extra)}, soonest = end;
  }
  return best;
}

// Launch the GEMM. before: the shape of the preceding GEMM that this one overlaps (Order::kOverlap), or null.
template <Layout kA, Layout kB, Order kOrder = Order::kAfter, class Epilogue>
cudaError_t launch(const Matrix& a, const Matrix& b, Shape s, const Epilogue& epilogue, cudaStream_t stream,
                   const Shape* before = nullptr) {
  CUtensorMap maps[2];
  if (cudaError_t e = make_tensor_map(&maps[0], a, kA, s.m, s.k, kA == Layout::kPlain ? kRows : kStep)) return e;
  if (cudaError_t e = make_tensor_map(&maps[1], b, kB, s.n, s.k,
                                      kB == Layout::kPlain ? kColumns / kClusterSize : kStep))
    return e;
  constexpr auto kernel = gemm<kA, kB, kOrder, Epilogue>;
  int max_clusters;
  if (cudaError_t e = prepare<kernel>(kSharedBytes, kClusterSize, &max_clusters)) return e;
  if (before) s.lead = choose_lead(*before, s, max_clusters);
  unsigned ctas = static_cast<unsigned>(std::min<int64_t>(cluster_tiles(s), max_clusters) * kClusterSize);
  return launch_pdl(kernel, ctas, kThreads, kSharedBytes, stream, maps[0], maps[1], s, epilogue);
}

}  // namespace
}  // namespace alignkit
