// A product of two bf16 matrices, a [m, k] . b [n, k]^T with sums in fp32, and an epilogue that takes them from registers.
//
// A cluster of two blocks takes 256 rows by 256 columns, each block 128 of the rows. One warp of a block copies operands to
// shared memory, b's for both blocks at once; two groups of four warps multiply 64 rows each by all columns. The second
// group starts a little later than the first and stays behind, so that one computes an epilogue while the other has the
// tensor core. Each output is one chain over ascending k, whatever the tile.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../ptx/barrier.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/dependent_launch.cuh"
#include "../ptx/wgmma.cuh"

namespace alignkit {
namespace {

constexpr int kRows = 128;      // of a block
constexpr int kGroupRows = 64;  // of a group of warps
constexpr int kColumns = 256;
constexpr int kStep = 64;  // of k
constexpr int kStages = 4;
constexpr int kBlocks = 2;  // of a cluster
constexpr int kBand = 16;   // clusters' rows that take turns over the same columns, 4096 rows: these stay in the L2 cache
constexpr int kBehind = 2;  // steps of k by which the second group starts later
constexpr int kThreads = 3 * 128;

// How a matrix lies in memory: rows of k, or, transposed, a row a k.
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
constexpr int kSharedBytes = sizeof(Shared) + 1024;  // to begin at a multiple of 1024

// Of a batch of rows, `before` of which come before these, the first *count count; null: all.
struct Count {
  const int* count;
  int before;

  __device__ int of(int rows) const { return count ? max(min(*count - before, rows), 0) : rows; }
};

// Of the clusters of a launch, the first `early` take `extra` tiles each before the others begin: these find the device taken by
// the kernel before.
struct Lead {
  int early, extra;
};

struct Shape {
  int m, n, k;
  Count count;  // of m; of k if a is transposed
  Lead lead;
};

// The order in which tiles are taken.
template <Layout kA>
struct Tiles {
  int down, across, counted, steps;
  int first;  // of this cluster

  __device__ Tiles(const Shape& s) {
    int cluster = blockIdx.x / kBlocks;
    first = s.lead.extra > 0 && cluster < s.lead.early ? cluster : s.lead.early * s.lead.extra + cluster;
    down = (s.m + kBlocks * kRows - 1) / (kBlocks * kRows);
    across = (s.n + kColumns - 1) / kColumns;
    counted = kA == Layout::kPlain ? (s.count.of(s.m) + kBlocks * kRows - 1) / (kBlocks * kRows) : down;
    steps = ((kA == Layout::kPlain ? s.k : s.count.of(s.k)) + kStep - 1) / kStep;
  }

  // The cluster's tile after tile i: those before `shared` are the early clusters' alone.
  __device__ int after(const Shape& s, int i) const {
    int shared = s.lead.early * s.lead.extra;
    if (i >= shared) return i + gridDim.x / kBlocks;
    return i + s.lead.early < shared ? i + s.lead.early : shared + blockIdx.x / kBlocks;
  }

  // The first row of the cluster and the first column of tile i; false if no row of it counts, or no k.
  __device__ bool at(int i, int& row, int& column) const {
    int first = i / (kBand * across) * kBand, band = min(kBand, down - first), j = i - first * across;
    int r = first + j % band;
    row = r * kBlocks * kRows;
    column = j / band * kColumns;
    return r < counted && steps > 0;
  }
};

template <Layout kA, Layout kB, class Epilogue>
__device__ void copy(Shared& sh, const CUtensorMap* a, const CUtensorMap* b, const Shape& s, const Epilogue& epilogue,
                     int rank) {
  constexpr uint16_t all = (1 << kBlocks) - 1;
  constexpr int half = kColumns / kBlocks, box = 64;  // of a transposed matrix
  Tiles<kA> tiles(s);
  int stage = 0, phase = 0;
  int early = max(tiles.steps - 8, 0) * kStep;  // as many steps before the end of a tile as hide the latency of memory
  for (int i = tiles.first; i < tiles.down * tiles.across; i = tiles.after(s, i)) {
    int row, column, soon_row, soon_column;
    if (!tiles.at(i, row, column)) continue;
    row += rank * kRows;
    if (Epilogue::kResumes && i == tiles.first) epilogue.prefetch(s, row, column);
    column += rank * half;
#pragma unroll 1
    for (int k = 0; k < tiles.steps * kStep; k += kStep, step<kStages>(stage, phase)) {
      if (k == early && tiles.at(Epilogue::kResumes ? tiles.after(s, i) : i, soon_row, soon_column))
        epilogue.prefetch(s, soon_row + rank * kRows, soon_column);
      barrier_wait(&sh.empty[stage], phase ^ 1);
      uint64_t* full = &sh.full[stage];
      barrier_expect(full, kStageBytes);
      __nv_bfloat16 *to_a = sh.stage[stage].a, *to_b = sh.stage[stage].b + rank * half * kStep;
      if (kA == Layout::kPlain)
        copy_box(to_a, a, k, row, full);
      else
        for (int j = 0; j < kRows; j += box) copy_box(to_a + j * kStep, a, row + j, k, full);
      if (kB == Layout::kPlain)
        copy_box_to(all, to_b, b, k, column, full);
      else
        for (int j = 0; j < half; j += box) copy_box_to(all, to_b + j * kStep, b, column + j, k, full);
    }
  }
}

// Where a thread's sums of a tile lie: rows `row` and row + 8, columns `column` + 8 j + e.
struct Place {
  int row, column, lane;
  int quad;      // see quad_of
  bool here[2];  // whether its rows exist

  __device__ Place(int m, int group_row, int first_column) {
    int thread = threadIdx.x % 128;
    lane = thread % 32;
    row = group_row + thread / 32 * 16 + lane / 4;
    column = first_column + 2 * (lane % 4);
    quad = first_column + lane / 2 % 2 * 4 + lane % 2 * 8;
    here[0] = row < m;
    here[1] = row + 8 < m;
  }
};

// Two lanes hold two neighbours each of two groups of eight columns. They trade, so that each has four neighbours, 16 bytes:
// of 32 such quads, the i-th is in row `row` + i / 16 * 8, columns from `quad` + i % 16 * 16 on.
constexpr int kQuads = 32;

__device__ __forceinline__ float4 quad_of(const float (&sums)[128], const Place& p, int i) {
  bool odd = p.lane & 1;
  int at = i % 16 * 8 + i / 16 * 2;
  float a = sums[at], b = sums[at + 1], c = sums[at + 4], d = sums[at + 5];
  float x = __shfl_xor_sync(~0u, odd ? a : c, 1), y = __shfl_xor_sync(~0u, odd ? b : d, 1);
  return odd ? make_float4(x, y, c, d) : make_float4(a, b, x, y);
}

__device__ __forceinline__ void set_quad(float (&sums)[128], const Place& p, int i, float4 v) {
  bool odd = p.lane & 1;
  int at = i % 16 * 8 + i / 16 * 2;
  float a = v.x, b = v.y, c = v.z, d = v.w;
  float x = __shfl_xor_sync(~0u, odd ? a : c, 1), y = __shfl_xor_sync(~0u, odd ? b : d, 1);
  sums[at] = odd ? x : a;
  sums[at + 1] = odd ? y : b;
  sums[at + 4] = odd ? c : x;
  sums[at + 5] = odd ? d : y;
}

// Sums of 2 kCount columns, rounded, to out [m, width], rows `pitch` elements apart; both are multiples of 8. Four lanes hold two
// neighbours each of eight columns; they trade until each has all eight of its own, 16 bytes.
template <int kCount>
__device__ __forceinline__ void store_rows(const float (&sums)[kCount], const Place& p, __nv_bfloat16* out, int64_t pitch,
                                           int64_t width, int first_column) {
  bool odd = p.lane & 1, high = p.lane & 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    __nv_bfloat16* row = out + (p.row + 8 * h) * pitch + first_column;
#pragma unroll
    for (int i = 0; i < kCount / 16; ++i) {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int at = 16 * i + 4 * j + 2 * h;
        __nv_bfloat162 pair = __floats2bfloat162_rn(sums[at], sums[at + 1]);
        w[j] = *reinterpret_cast<uint32_t*>(&pair);
      }
      uint32_t x = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), y = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
      (odd ? w[0] : w[1]) = x;
      (odd ? w[2] : w[3]) = y;
      x = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2), y = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
      (high ? w[0] : w[2]) = x;
      (high ? w[1] : w[3]) = y;
      int column = 32 * i + 8 * (p.lane % 4);
      if (p.here[h] && first_column + column < width)
        __stcg(reinterpret_cast<uint4*>(row + column), make_uint4(w[0], w[1], w[2], w[3]));  // one store, by its name
    }
  }
}

// An Epilogue has
// - begin(Shape, sums, the group's first row, first column), before the products: what run will need of memory;
// - kResumes: whether the products go on from sums, which begin sets;
// - run, the same and what begin returned, after them;
// - skip(Shape, the group's first row, first column), for a tile without rows or k that count;
// - prefetch(Shape, a block's first row, first column): what begin will read, if it sets sums, or else run.
struct FromZero {
  static constexpr bool kResumes = false;
  struct State {};
  __device__ State begin(const Shape&, float (&)[128], int, int) const { return {}; }
  __device__ void prefetch(const Shape&, int, int) const {}
};

template <Layout kA, Layout kB, class Epilogue>
__device__ void multiply_tiles(Shared& sh, const Shape& s, const Epilogue& epilogue, int rank) {
  constexpr bool a_transposed = kA == Layout::kTransposed, b_transposed = kB == Layout::kTransposed;
  Tiles<kA> tiles(s);
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the compiler sees that it is a warp's
  int stage = 0, phase = 0;
  bool late = group == 1, first = true;
  uint64_t a0 = operand<a_transposed>(sh.stage[0].a + group * kGroupRows * kStep);
  uint64_t b0 = operand<b_transposed>(sh.stage[0].b);
  float sums[128];
  for (int i = tiles.first; i < tiles.down * tiles.across; i = tiles.after(s, i)) {
    int row, column;
    bool counts = tiles.at(i, row, column);
    row += rank * kRows + group * kGroupRows;
    if (!counts) {
      epilogue.skip(s, row, column);
      continue;
    }
    auto state = epilogue.begin(s, sums, row, column);
    if (Epilogue::kResumes) products_taken(sums);
    if (kBehind && first && late) named_barrier_sync(1, 256);
    int before = 0;
#pragma unroll 1
    for (int k = 0; k < tiles.steps; ++k) {
      barrier_wait(&sh.full[stage], phase);
      uint64_t a = a0 + stage * (kStageBytes >> 4), b = b0 + stage * (kStageBytes >> 4);
      products_begin();
#pragma unroll
      for (int j = 0; j < kStep / 16; ++j)
        multiply<a_transposed, b_transposed>(sums, a + j * kNext<a_transposed>, b + j * kNext<b_transposed>,
                                             Epilogue::kResumes || k + j > 0);
      products_end();
      if (first && !late && k == min(kBehind, tiles.steps) - 1) named_barrier_arrive(1, 256);
      if (k > 0) {
        products_wait<1>();
        if (threadIdx.x % 32 < kBlocks) barrier_arrive(&sh.empty[before], threadIdx.x % 32);
      }
      before = stage;
      step<kStages>(stage, phase);
    }
    products_wait<0>();
    products_taken(sums);
    if (threadIdx.x % 32 < kBlocks) barrier_arrive(&sh.empty[before], threadIdx.x % 32);
    epilogue.run(s, sums, row, column, state);
    first = false;
  }
}

// When a kernel's work may begin: after the kernel before it in the stream, or beside that, if that began after the one
// before. Either ends after it.
enum class Order { kAfter, kBeside };

template <Layout kA, Layout kB, Order kOrder, class Epilogue>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    gemm(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const Shape s,
         const Epilogue epilogue) {
  extern __shared__ uint8_t raw[];
  Shared& sh = *reinterpret_cast<Shared*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  int rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&sh.full[i], 1);
      barrier_init(&sh.empty[i], 8 * kBlocks);  // warps that multiply, in both blocks
    }
    barrier_init_done();
  }
  cluster_sync();
  if (kOrder == Order::kAfter) wait_for_kernel_before();
  let_next_kernel_begin();
  if (threadIdx.x / 128 == 2) {
    registers_down<40>();
    if (threadIdx.x == 2 * 128) copy<kA, kB>(sh, &a, &b, s, epilogue, rank);
  } else {
    registers_up<232>();
    multiply_tiles<kA, kB>(sh, s, epilogue, rank);
  }
  __syncwarp();
  cluster_sync();  // nobody leaves while the other block may still write here
  if (kOrder == Order::kBeside) wait_for_kernel_before();
}

// Host.

// bf16, `pitch` elements from one row of memory to the next.
struct Matrix {
  const void* data;
  int64_t pitch;
};

// Of a matrix [rows, k], taken `box_rows` rows by 64 of k at a time.
inline cudaError_t map_of(CUtensorMap* map, const Matrix& matrix, Layout layout, int64_t rows, int64_t k, int box_rows) {
  if (!encode()) return cudaErrorNotSupported;
  bool plain = layout == Layout::kPlain;
  cuuint64_t size[2] = {static_cast<cuuint64_t>(plain ? k : rows), static_cast<cuuint64_t>(plain ? rows : k)};
  cuuint64_t stride[1] = {static_cast<cuuint64_t>(matrix.pitch) * 2};
  cuuint32_t across = kStep, down = box_rows, box[2] = {plain ? across : down, plain ? down : across}, one[2] = {1, 1};
  CUresult made = encode()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix.data), size, stride, box,
                           one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Lets the kernel have `bytes` of shared memory, and finds out how many clusters of its kind the device holds, or, of a kernel
// without clusters, blocks. Both once for each device that a thread uses in turn.
template <auto kKernel>
cudaError_t prepare(int bytes, int blocks_of_cluster, int* most) {
  static thread_local int prepared = -1, held = 0;
  int device;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (prepared != device) {
    if (cudaError_t e = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks_of_cluster;
    config.blockDim = kThreads;
    config.dynamicSmemBytes = bytes;
    if (cudaError_t e = blocks_of_cluster == 1 ? cudaDeviceGetAttribute(&held, cudaDevAttrMultiProcessorCount, device)
                                               : cudaOccupancyMaxActiveClusters(&held, kKernel, &config))
      return e;
    prepared = device;
  }
  *most = held;
  return cudaSuccess;
}

inline int64_t up(int64_t n, int64_t by) { return (n + by - 1) / by; }
inline int64_t tiles_of(const Shape& s) { return up(s.m, kBlocks * kRows) * up(s.n, kColumns); }

// Of a product that begins beside another, where that leaves clusters idle over its last tiles: as many extra tiles for those as
// end both soonest.
inline Lead lead_of(const Shape& before, const Shape& s, int clusters) {
  int64_t tiles = tiles_of(s), idle = (clusters - tiles_of(before) % clusters) % clusters;
  int64_t lead = up(before.k, kStep), each = up(s.k, kStep), soonest = INT64_MAX;
  Lead best = {};
  for (int64_t extra = 0; idle * extra <= tiles && (extra - 1) * each < lead; ++extra) {
    int64_t ends = std::max(lead, extra * each) + up(tiles - idle * extra, clusters) * each;
    if (ends < soonest) best = {static_cast<int>(idle), static_cast<int>(extra)}, soonest = ends;
  }
  return best;
}

// before: the product beside which this one begins; null if it begins after the kernel before it.
template <Layout kA, Layout kB, Order kOrder = Order::kAfter, class Epilogue>
cudaError_t launch(const Matrix& a, const Matrix& b, Shape s, const Epilogue& epilogue, cudaStream_t stream,
                   const Shape* before = nullptr) {
  CUtensorMap maps[2];
  if (cudaError_t e = map_of(&maps[0], a, kA, s.m, s.k, kA == Layout::kPlain ? kRows : kStep)) return e;
  if (cudaError_t e = map_of(&maps[1], b, kB, s.n, s.k, kB == Layout::kPlain ? kColumns / kBlocks : kStep)) return e;
  constexpr auto kernel = gemm<kA, kB, kOrder, Epilogue>;
  int most;
  if (cudaError_t e = prepare<kernel>(kSharedBytes, kBlocks, &most)) return e;
  if (before) s.lead = lead_of(*before, s, most);
  unsigned blocks = static_cast<unsigned>(std::min<int64_t>(tiles_of(s), most) * kBlocks);
  return launch_early(kernel, blocks, kThreads, kSharedBytes, stream, maps[0], maps[1], s, epilogue);
}

}  // namespace
}  // namespace alignkit
