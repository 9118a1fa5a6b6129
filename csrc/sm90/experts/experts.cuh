// Products of rows that are dealt out to experts, those of each by a matrix of its own: which rows and columns a block of
// threads takes, and where the matrices lie.
#pragma once
#include "../gemm/gemm.cuh"

namespace alignkit {
namespace {

constexpr int kMostExperts = 1024;
constexpr int kBandRows = 16;  // tiles of rows that take turns over the same columns

// Pairs of a row and an expert lie in the order of experts.
struct Experts {
  const int64_t* offsets;  // the first pair of each; at last, how many there are
  int count;
  int across;  // tiles of columns
};

// For each expert: its first pair, and how many tiles of rows come before its own. Likewise behind the last one.
struct Rows {
  int pair[kMostExperts + 1];
  int tiles[kMostExperts + 1];
};

// By a whole warp, of tiles of kHeight rows. It asks memory for the ends of many experts before it waits for the first of them.
template <int kHeight>
__device__ __forceinline__ void count_tiles(Rows& rows, const Experts& e) {
  constexpr int at_once = 5;  // 32 experts each; of 128 all
  int lane = threadIdx.x % 32, before = 0;
#pragma unroll 1
  for (int first = 0; first <= e.count; first += at_once * 32) {
    int pair[at_once], end[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      int expert = first + i * 32 + lane;
      pair[i] = static_cast<int>(e.offsets[min(expert, e.count)]);
      end[i] = static_cast<int>(e.offsets[min(expert + 1, e.count)]);
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      int expert = first + i * 32 + lane, tiles = (end[i] - pair[i] + kHeight - 1) / kHeight, sum = tiles;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        int other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
      }
      if (expert <= e.count) {
        rows.pair[expert] = pair[i];
        rows.tiles[expert] = before + sum - tiles;
      }
      before += __shfl_sync(~0u, sum, 31);
    }
  }
}

// What a kernel of these begins with. Shared has stages' barriers `full`, of so many arrivals, and `empty`, of kWarps that
// multiply, and `rows`.
template <class Shared, int kHeight = kRows, int kWarps = 8>
__device__ __forceinline__ Shared& begin_block(uint8_t* raw, const Experts& e, int arrivals) {
  constexpr int depth = sizeof(Shared::full) / sizeof(uint64_t);
  Shared& sh = *reinterpret_cast<Shared*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < depth; ++i) {
      barrier_init(&sh.full[i], arrivals);
      barrier_init(&sh.empty[i], kWarps);
    }
    barrier_init_done();
  }
  wait_for_kernel_before();
  let_next_kernel_begin();
  if (threadIdx.x < 32) count_tiles<kHeight>(sh.rows, e);
  __syncthreads();
  return sh;
}

struct Tile {
  int expert;
  int row, end;  // the first pair, and the one behind the expert's last
  int column;    // a tile's
};

// The tiles of a block, one after the other, of kHeight rows each.
template <int kHeight = kRows>
struct Walk {
  const Rows& rows;
  const Experts& experts;
  int i, expert = -1;

  __device__ Walk(const Rows& rows, const Experts& experts) : rows(rows), experts(experts), i(blockIdx.x) {}

  __device__ bool next(Tile& t) {
    int down = rows.tiles[experts.count];
    if (i >= down * experts.across) return false;
    int first = i / (kBandRows * experts.across) * kBandRows, band = min(kBandRows, down - first);
    int j = i - first * experts.across, r = first + j % band;
    if (expert < 0) expert = find(r);
    while (rows.tiles[expert + 1] <= r) ++expert;
    while (rows.tiles[expert] > r) --expert;
    t.expert = expert;
    t.row = rows.pair[expert] + (r - rows.tiles[expert]) * kHeight;
    t.end = rows.pair[expert + 1];
    t.column = j / band;
    i += gridDim.x;
    return true;
  }

  // The expert of the first tile may be far from any, those of the next are near it.
  __device__ int find(int r) const {
    int last = 0;  // of those known to begin at or before it
    for (int far = kMostExperts / 2; far; far /= 2)
      if (last + far < experts.count && rows.tiles[last + far] <= r) last += far;
    return last;
  }
};

// The experts' matrices, bf16, as the copy engine knows them: all of them one behind the other, or each by itself.
struct Matrices {
  const CUtensorMap* each;  // in memory; null: there is one for all
  int rows;                 // of a matrix

  __device__ const CUtensorMap* map(const CUtensorMap* all, int expert) const {
    if (!each) return all;
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(each + expert) : "memory");
    return each + expert;
  }
  __device__ int first_row(int expert) const { return each ? 0 : expert * rows; }
};

// Host.

// As many blocks as there may be tiles, or as the device holds.
inline unsigned blocks_of(int64_t pairs, const Experts& e, int processors) {
  return static_cast<unsigned>(std::min<int64_t>((pairs / kRows + e.count) * e.across, processors));
}

// The map of one matrix, to memory of the caller.
inline cudaError_t write_map(void* to, const Matrix& matrix, int rows, int k, int box_rows) {
  CUtensorMap map;
  cudaError_t e = map_of(&map, matrix, Layout::kPlain, rows, k, box_rows);
  if (!e) std::copy_n(reinterpret_cast<const char*>(&map), sizeof(map), static_cast<char*>(to));
  return e;
}

}  // namespace
}  // namespace alignkit
