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

// For each expert: its first pair, and how many tiles come before its own, of rows, or, by clusters, turns. Likewise behind the
// last one.
struct Rows {
  int pair[kMostExperts + 1];
  int tiles[kMostExperts + 1];
};

// By a whole warp, where `of` rows are so many. It asks memory for the ends of many experts before it waits for the first of them.
template <class Of>
__device__ __forceinline__ void count_tiles(Rows& rows, const Experts& e, const Of& of) {
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
      int expert = first + i * 32 + lane, tiles = of(end[i] - pair[i]), sum = tiles;
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
// multiply in each of the kBlocks of a cluster, and `rows`, which are counted by `of`.
template <class Shared, int kWarps, int kBlocks, class Of>
__device__ __forceinline__ Shared& begin_block(uint8_t* raw, const Experts& e, int arrivals, const Of& of) {
  constexpr int depth = sizeof(Shared::full) / sizeof(uint64_t);
  Shared& sh = *reinterpret_cast<Shared*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < depth; ++i) {
      barrier_init(&sh.full[i], arrivals);
      barrier_init(&sh.empty[i], kWarps * kBlocks);
    }
    barrier_init_done();
  }
  if (kBlocks > 1) cluster_sync();
  wait_for_kernel_before();
  let_next_kernel_begin();
  if (threadIdx.x < 32) count_tiles(sh.rows, e, of);
  __syncthreads();
  return sh;
}

// Likewise, of blocks by themselves that take tiles of kHeight rows.
template <class Shared, int kHeight = kRows, int kWarps = 8>
__device__ __forceinline__ Shared& begin_block(uint8_t* raw, const Experts& e, int arrivals) {
  return begin_block<Shared, kWarps, 1>(raw, e, arrivals, [](int rows) { return (rows + kHeight - 1) / kHeight; });
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

// The turns of clusters of kTall by kWide blocks. A block takes a tile of 128 rows; a cluster, in its turn, kTall of an expert's
// tiles of rows by kWide of columns, or, of the last tile of rows where their number is odd, kTall * kWide of columns. So blocks
// share operands, and tiles are no larger for it.
template <int kTall, int kWide>
struct Turns {
  static_assert(kTall <= 2);
  static constexpr int kBlocks = kTall * kWide;

  struct Tile {
    int expert;
    int row, end;  // of this block: the first pair, and the one behind the expert's last
    int column;    // a tile's
    bool flat;     // all blocks of the cluster have the same rows
  };

  const Rows& rows;
  const Experts& experts;
  int rank, i, expert = -1;

  __device__ Turns(const Rows& rows, const Experts& experts)
      : rows(rows), experts(experts), rank(kBlocks > 1 ? cluster_rank() : 0), i(blockIdx.x / kBlocks) {}

  __host__ __device__ static int tall(int across) { return (across + kWide - 1) / kWide; }
  __host__ __device__ static int flat(int across) { return (across + kBlocks - 1) / kBlocks; }

  // Of an expert with so many rows.
  __device__ static int of(int rows, int across) {
    int tiles = (rows + kRows - 1) / kRows;
    return tiles / kTall * tall(across) + tiles % kTall * flat(across);
  }

  __device__ bool next(Tile& t) {
    if (i >= rows.tiles[experts.count]) return false;
    if (expert < 0) expert = find();
    while (rows.tiles[expert + 1] <= i) ++expert;
    constexpr int band_rows = kBandRows / kTall;
    int begin = rows.pair[expert], j = i - rows.tiles[expert], wide = tall(experts.across);
    t.expert = expert;
    t.end = rows.pair[expert + 1];
    int down = (t.end - begin + kRows - 1) / kRows / kTall;
    t.flat = j >= down * wide;
    if (t.flat) {
      t.row = begin + down * kTall * kRows;
      t.column = (j - down * wide) * kBlocks + rank;
    } else {
      int first = j / (band_rows * wide) * band_rows, band = min(band_rows, down - first);
      j -= first * wide;
      t.row = begin + ((first + j % band) * kTall + rank / kWide) * kRows;
      t.column = j / band * kWide + rank % kWide;
    }
    i += gridDim.x / kBlocks;
    return true;
  }

  // The last expert whose turns begin at or before i.
  __device__ int find() const {
    int last = 0;
    for (int far = kMostExperts / 2; far; far /= 2)
      if (last + far < experts.count && rows.tiles[last + far] <= i) last += far;
    return last;
  }
};

// The experts' matrices, bf16, as the copy engine knows them: all of them one behind the other, or each by itself.
struct Matrices {
  const CUtensorMap* each;  // in memory; null: there is one for all
  int rows;                 // of a matrix

  __device__ const CUtensorMap* map(const CUtensorMap* all, int expert) const {
    if (!each) return all;
    map_seen(each + expert);
    return each + expert;
  }
  __device__ int first_row(int expert) const { return each ? 0 : expert * rows; }
};

// Host.

// Blocks of as many clusters as there may be turns, or as the device holds.
template <class Turns>
unsigned blocks_of(int64_t pairs, const Experts& e, int clusters) {
  return static_cast<unsigned>(std::min<int64_t>((pairs / kRows + e.count) * Turns::tall(e.across), clusters) * Turns::kBlocks);
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
