// Shared by the grouped GEMMs over experts: the tile scheduler, the kernel prologue and the experts' tensor maps.
// A pair is one token and one expert that it is routed to. Pairs lie in expert order, so each expert has consecutive
// rows. The order of tiles changes no bits.
#pragma once
#include "../gemm/gemm.cuh"

namespace alignkit {
namespace {

constexpr int kBandTiles = 16;  // schedule: row tiles per band, which share a weight tile in L2

// The rows of each expert, in expert order.
struct Experts {
  const int64_t* offsets;  // first pair of each expert, then the number of pairs
  int count;
  int column_tiles;  // column tiles of an expert's output
};

// For each expert: its first pair, and the number of row tiles before its own. The last entry holds the totals.
struct ExpertTable {
  int pair[kMaxExperts + 1];
  int tiles[kMaxExperts + 1];
};

// Fill the table for row tiles of kTileRows rows, by one warp. Loads of many experts are issued before the first is
// used.
template <int kTileRows>
__device__ __forceinline__ void count_tiles(ExpertTable& table, const Experts& e) {
  constexpr int per_iteration = 5;  // warps of experts; one iteration covers 128 experts
  int lane = threadIdx.x % 32, before = 0;
#pragma unroll 1
  for (int first = 0; first <= e.count; first += per_iteration * 32) {
    int pair[per_iteration], end[per_iteration];
#pragma unroll
    for (int i = 0; i < per_iteration; ++i) {
      int expert = first + i * 32 + lane;
      pair[i] = static_cast<int>(e.offsets[min(expert, e.count)]);
      end[i] = static_cast<int>(e.offsets[min(expert + 1, e.count)]);
    }
#pragma unroll
    for (int i = 0; i < per_iteration; ++i) {
      int expert = first + i * 32 + lane, tiles = (end[i] - pair[i] + kTileRows - 1) / kTileRows, sum = tiles;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        int other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
      }
      if (expert <= e.count) {
        table.pair[expert] = pair[i];
        table.tiles[expert] = before + sum - tiles;
      }
      before += __shfl_sync(~0u, sum, 31);
    }
  }
}

// Common prologue: initialize the pipeline barriers, wait for the previous kernel (PDL) and fill the expert table.
// Shared has `full` barriers with `arrivals` arrivals, `empty` barriers with one per consumer warp, and `table`.
template <class Shared, int kTileRows = kRows, int kConsumerWarps = 8>
__device__ __forceinline__ Shared& prologue(uint8_t* raw, const Experts& e, int arrivals) {
  constexpr int depth = sizeof(Shared::full) / sizeof(uint64_t);
  Shared& sh = *reinterpret_cast<Shared*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < depth; ++i) {
      mbarrier_init(&sh.full[i], arrivals);
      mbarrier_init(&sh.empty[i], kConsumerWarps);
    }
    fence_mbarrier_init();
  }
  griddep_wait();
  griddep_launch_dependents();
  if (threadIdx.x < 32) count_tiles<kTileRows>(sh.table, e);
  __syncthreads();
  return sh;
}

struct Tile {
  int expert;
  int row, end;  // first pair of the tile; end of the expert's pairs
  int column;    // index of the column tile
};

// The tile scheduler of a persistent CTA, for row tiles of kTileRows rows.
template <int kTileRows = kRows>
struct TileScheduler {
  const ExpertTable& table;
  const Experts& experts;
  int i, expert = -1;

  __device__ TileScheduler(const ExpertTable& table, const Experts& experts)
      : table(table), experts(experts), i(blockIdx.x) {}

  __device__ bool next(Tile& t) {
    int row_tiles = table.tiles[experts.count];
    if (i >= row_tiles * experts.column_tiles) return false;
    int first = i / (kBandTiles * experts.column_tiles) * kBandTiles, band = min(kBandTiles, row_tiles - first);
    int j = i - first * experts.column_tiles, r = first + j % band;
    if (expert < 0) expert = find_expert(r);
    while (table.tiles[expert + 1] <= r) ++expert;
    while (table.tiles[expert] > r) --expert;
    t.expert = expert;
    t.row = table.pair[expert] + (r - table.tiles[expert]) * kTileRows;
    t.end = table.pair[expert + 1];
    t.column = j / band;
    i += gridDim.x;
    return true;
  }

  // Binary search for the first tile's expert; later tiles' experts are near it.
  __device__ int find_expert(int r) const {
    int found = 0;  // the last expert known to start at or before r
    for (int step = kMaxExperts / 2; step; step /= 2)
      if (found + step < experts.count && table.tiles[found + step] <= r) found += step;
    return found;
  }
};

// Tensor maps of the experts' bf16 matrices: one map of all matrices stacked, or one map per expert.
struct Matrices {
  const CUtensorMap* per_expert;  // in global memory; null: use the stacked map
  int rows;                       // per matrix

  __device__ const CUtensorMap* map(const CUtensorMap* stacked, int expert) const {
    if (!per_expert) return stacked;
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(per_expert + expert) : "memory");
    return per_expert + expert;
  }
  __device__ int first_row(int expert) const { return per_expert ? 0 : expert * rows; }
};

// Host code.

// Return the smaller of the upper bound of tiles and the number of SMs.
inline unsigned grid_size(int64_t pairs, const Experts& e, int sms) {
  return static_cast<unsigned>(std::min<int64_t>((pairs / kRows + e.count) * e.column_tiles, sms));
}

// Write the tensor map of one matrix to the caller's memory.
inline cudaError_t write_tensor_map(void* dst, const Matrix& matrix, int rows, int k, int box_rows) {
  CUtensorMap map;
  cudaError_t e = make_tensor_map(&map, matrix, Layout::kPlain, rows, k, box_rows);
  if (!e) std::copy_n(reinterpret_cast<const char*>(&map), sizeof(map), static_cast<char*>(dst));
  return e;
}

}  // namespace
}  // namespace alignkit
