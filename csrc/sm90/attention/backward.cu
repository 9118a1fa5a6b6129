// Causal attention, backward, of packed sequences.
//
// By key: a tile of 64 keys for each of two groups of warps stays, and blocks of 64 queries pass by, ascending, head after
// head of a group of heads. Two warps have the copy engine bring them. The other groups make the probabilities again from
// the scores and a number for each query, and keep the sums of keys and values in registers. What a thread holds of a
// product of 64 by 64, rounded, is what it has to give to the next one: nothing goes through shared memory. While a group
// computes, another has the tensor core; and a group begins the next block's products before the last one of a block is
// done. The gradients of scores are kept in memory, in squares of 64 by 64.
//
// Sum: a tile of 64 queries for each of three groups; the squares, times the keys, ascending.
//
// These two do a chunk of squares, as many as there is room for, and then the next. The sums of keys and values wait in
// memory meanwhile. What is left after the last chunk is done by key without keeping squares, and in place of the sum
//
// By query: as by key, but queries stay, and keys and values pass by; the scores are computed once more.
//
// Tiles are dealt out to as many blocks of threads as there are multiprocessors, those that see most first, in turns
// that go to and fro. Lengths are read on the device.
#include <algorithm>

#include "../../interface.h"
#include "../ptx/barrier.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/dependent_launch.cuh"
#include "../ptx/exponential.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/load.cuh"
#include "../ptx/pack.cuh"
#include "../ptx/thread.cuh"
#include "../ptx/wgmma.cuh"
#include "heads.cuh"

struct AlignkitAttentionBackward {
  AlignkitHeads q, k, v, grad;  // the latter of the result
  const float *shift, *delta;   // by query, [heads, pads * 128]: see alignkit/ops/attention/gradients.py
  void *dq, *dk, *dv;           // [tokens, heads or kv_heads, dim]
  void* kept;     // room for squares, 64 queries by 64 keys of a head; null: nothing is kept, the scores are computed twice
  float* parked;  // sums of keys and values between two chunks, [kv_heads, tokens / 64 + sequences + 1, 2, 64, dim]
  AlignkitInts starts;
  int squares;       // of one head of each group, at most; of all heads fewer than 2^30
  int room;          // squares at which a chunk ends: the block of queries whose squares begin before is the last
  int chunks, rest;  // whether there may be squares behind the last chunk
  int tokens, sequences, heads, kv_heads, dim, pads;
  float factor, scale;  // of scores for powers of 2, and of gradients
};

ALIGNKIT_LAYOUT(AlignkitAttentionBackward, q, k, v, grad, shift, delta, dq, dk, dv, kept, parked, starts, squares, room,
                chunks, rest, tokens, sequences, heads, kv_heads, dim, pads, factor, scale)

namespace alignkit {
namespace {

struct Problem : AlignkitAttentionBackward {
  int group;  // heads of queries for one of keys
  int from;   // the chunk: blocks of queries whose squares begin from here on, before from + room
};

constexpr int kBlock = 64;                        // rows of a block
constexpr int kSquareBytes = kBlock * kBlock * 2;  // keys by queries, as a group of warps holds them: 16 bytes of a thread
                                                   // beside 16 of the next

// Groups of 64 rows, blocks on their way, and registers of threads that bring them and that compute.
template <int kDim, bool kByKey>
struct Plan;  // in all no more than at the start: 168 of each thread

template <>
struct Plan<128, false> {
  static constexpr int groups = 2, stages = 4, few = 88, many = 208;
};

template <>
struct Plan<128, true> {
  static constexpr int groups = 2, stages = 4, few = 24, many = 240;
};

template <bool kByKey>
struct Plan<64, kByKey> {
  static constexpr int groups = 2, stages = 8, few = 88, many = 208;
};

// The squares of a head of each group stand in one line: sequence after sequence, in a sequence by blocks of queries, of
// those by heads of keys, then by blocks of keys. Behind them stand those of the groups' next heads.
struct Line {
  int head, sequence;  // squares of one head of each group, and of those the ones before the sequence

  // Where the squares of a block of queries begin, from the chunk's on.
  __device__ int at(const Problem& p, int member, int block) const {
    return member * head + sequence + block * (block + 1) / 2 * p.kv_heads - p.from;
  }
  // The first block of queries whose squares begin at `square` or behind; `blocks` if there is none.
  __device__ int block_at(const Problem& p, int member, int square, int blocks) const {
    int low = 0;
#pragma unroll 1
    while (low < blocks) {
      int middle = (low + blocks) / 2;
      if (at(p, member, middle) >= square)
        blocks = middle;
      else
        low = middle + 1;
    }
    return low;
  }
};

struct Tile {
  int s;  // the sequence; -1: there are no more tiles
  int q0, q_len;
  int first;  // position
  int head;   // of queries, or of keys
  int count;  // blocks that pass by, of all heads of the group where those are queries
  bool goes_on, breaks_off;  // whether its sums began in a chunk before, and end in a later one
  Line line;
};

// The blocks of queries of a head that pass by a tile of keys, and the first square of theirs with its first 64 keys.
struct Passing {
  int begin, end, square;
};

constexpr int kGroup = 64;  // heads of queries for one of keys, at most

__device__ __forceinline__ int blocks(int rows) { return (rows + kBlock - 1) / kBlock; }

// What a walk knows of the sequences of its lanes, and of all: in shared memory, for registers are short.
struct Seen {
  int q0[32], q_len[32], levels[32], sequence[32];  // the latter: see Line
  int head, squares;  // see Line; squares of the sequences before those of the lanes, and then of these too
  int level, base, before, target;  // where the walk is, and which tile is next
  int steps[2];                     // from there to the one after it, and from that to the next, in turn
  int turn;                         // which of two is the tile to bring
};

// kByKey: keys and values stay, and queries and the result's gradients pass by; else the other way round.
template <int kDim, bool kByKey>
struct Shared {
  using plan = Plan<kDim, kByKey>;
  static constexpr int groups = plan::groups, stages = plan::stages, rows = groups * 64;
  static constexpr int halves = kDim / kHalf, threads = (groups + 1) * 128;
  __nv_bfloat16 stays[2][rows * kDim];
  __nv_bfloat16 passes[stages][2][kBlock * kDim];
  alignas(128) float statistics[kByKey ? stages : 1][2][kBlock];  // shift and delta of the queries that pass
  int place[stages];                                              // of the queries: blocks from the tile's first key on
  bool last[stages];                                              // of the tile's blocks
  int left;                                                       // of those, on their way yet
  int square[stages];                                             // theirs with the tile's first 64 keys
  Tile tile[2];                                                   // in turn: one is read while the next is found
  Seen seen;
  int turn[threads / 32];  // of each warp that computes
  Passing passing[kByKey ? 2 : 1][kByKey ? kGroup : 1];           // by the tile, of each head of the group
  uint64_t found, noticed, tile_full, tile_empty, full[stages], empty[stages];
  uint64_t on_its_way;  // a block of which rows have to be wiped out
};

// The tiles of a block of threads, found by a whole warp. A tile's level tells how many blocks pass by it; tiles are
// counted level by level, the last one first. Sequences of which the chunk has nothing have no tiles.
template <int kRows, bool kByKey>
struct Walk {
  const Problem& p;
  Seen& seen;

  __device__ Walk(const Problem& p, Seen& seen) : p(p), seen(seen) {
    int top = 0;
#pragma unroll 1
    for (int base = 0; base < p.sequences; base += 32) read(base, false);
    if (lane() == 0) seen.head = seen.squares;
    __syncwarp();
#pragma unroll 1
    for (int base = 0; base < p.sequences; base += 32) {
      read(base, true);
      top = max(top, seen.levels[lane()]);
    }
#pragma unroll 1
    for (int distance = 16; distance; distance /= 2) top = max(top, __shfl_xor_sync(~0u, top, distance));
    read(0, true);
    if (lane() == 0) {
      seen.level = top - 1;
      seen.base = seen.before = seen.turn = 0;
      seen.target = blockIdx.x;
      seen.steps[0] = 2 * (gridDim.x - 1 - blockIdx.x) + 1;
      seen.steps[1] = 2 * blockIdx.x + 1;
    }
    __syncwarp();
  }

  __device__ static int lane() { return static_cast<int>(thread_again() % 32); }

  // The sequence base + lane.
  __device__ void read(int base, bool choose) {
    int s = base + lane(), q0 = 0, q_len = 0;
    if (s < p.sequences) {
      q0 = static_cast<int>(min(max(at(p.starts, s), int64_t{0}), int64_t{p.tokens}));
      q_len = static_cast<int>(min(max(at(p.starts, s + 1), int64_t{q0}), int64_t{p.tokens})) - q0;
    }
    int own = blocks(q_len) * (blocks(q_len) + 1) / 2 * p.kv_heads, sum = own;
#pragma unroll 1
    for (int distance = 1; distance < 32; distance *= 2) {
      int other = __shfl_sync(~0u, sum, lane() - distance & 31);
      if (lane() >= distance) sum = min(sum + other, p.squares + 1);  // more there are only where starts decrease
    }
    int end = sum + (base ? seen.squares : 0), levels = end > p.squares ? 0 : (q_len + kRows - 1) / kRows;
    if (choose && levels) {
      int member = end > p.from ? 0 : (p.from - end) / seen.head + 1;  // the first that does not end before
      if (member >= p.group || member * seen.head + end - own - p.from >= p.room) levels = 0;
    }
    __syncwarp();
    seen.q0[lane()] = q0;
    seen.q_len[lane()] = q_len;
    seen.levels[lane()] = levels;
    seen.sequence[lane()] = end - own;
    if (lane() == 31) seen.squares = min(end, p.squares + 1);
    __syncwarp();
  }

  // The next tile, to shared memory.
  __device__ void next(Tile& t) {
    int level = seen.level, base = seen.base, before = seen.before;
    int slots = kByKey ? p.kv_heads : p.heads;
#pragma unroll 1
    while (level >= 0) {
      bool here = level < seen.levels[lane()];
      unsigned all = __ballot_sync(~0u, here);
      int i = seen.target - before;
      if (i < __popc(all) * slots) {
        if (here && __popc(all & ((1u << lane()) - 1)) == i / slots) {
          t.s = base + lane();
          t.q0 = seen.q0[lane()];
          t.q_len = seen.q_len[lane()];
          t.first = (kByKey ? seen.levels[lane()] - 1 - level : level) * kRows;
          t.head = i % slots;
          t.line = {seen.head, seen.sequence[lane()]};
        }
        __syncwarp();
        if (lane() == 0) {
          int step = seen.steps[0];
          seen.level = level;
          seen.base = base;
          seen.before = before;
          seen.target += step;
          seen.steps[0] = seen.steps[1];
          seen.steps[1] = step;
        }
        __syncwarp();
        return;
      }
      before += __popc(all) * slots;
      base += 32;
      if (base >= p.sequences) {
        base = 0;
        --level;
      }
      if (p.sequences > 32) read(base, true);
    }
    __syncwarp();
    if (lane() == 0) t.s = -1;
    __syncwarp();
  }
};

__device__ __forceinline__ Passing passing_by(const Problem& p, const Tile& t, int member) {
  int first = t.first / kBlock, all = blocks(t.q_len), begin = max(t.line.block_at(p, member, 0, all), first);
  int end = max(t.line.block_at(p, member, p.room, all), begin);
  return {begin, end, t.line.at(p, member, begin) + t.head * (begin + 1) + first};
}

// Whether a block of queries is of the chunk.
__device__ __forceinline__ bool is_here(const Problem& p, const Tile& t, int block) {
  int square = t.line.at(p, t.head % p.group, block);
  return block * kBlock < t.q_len && square >= 0 && square < p.room;
}

// How many blocks pass by a tile in the chunk; by a whole warp.
template <int kCount, bool kByKey>
__device__ __forceinline__ int count(const Problem& p, const Tile& t) {
  int count = 0;
  if constexpr (kByKey) {
#pragma unroll 1
    for (int member = thread_again() % 32; member < p.group; member += 32) {
      Passing passing = passing_by(p, t, member);
      count += passing.end - passing.begin;
    }
#pragma unroll 1
    for (int distance = 16; distance; distance /= 2) count += __shfl_xor_sync(~0u, count, distance);
  } else {
    for (int g = 0; g < kCount; ++g)
      if (is_here(p, t, t.first / kBlock + g)) count = t.first / kBlock + g + 1;
  }
  return count;
}

// The warp that finds the tiles and has them brought. The next one is found ahead, so that its blocks may be on their way
// while there is no room for its rows.
template <int kDim, bool kByKey>
__device__ __forceinline__ void bring_tiles(Shared<kDim, kByKey>& sh, const CUtensorMap* a, const CUtensorMap* b,
                                            const Problem& p) {
  constexpr int rows = Shared<kDim, kByKey>::rows;
  Walk<rows, kByKey> walk(p, sh.seen);
  auto turn = [&] { return sh.seen.turn; };
#pragma unroll 1
  for (;;) {
    barrier_wait(&sh.noticed, turn() ^ 1);
    Tile& t = sh.tile[turn()];
    int passing = 0;
#pragma unroll 1
    do {
      walk.next(t);
      if (t.s >= 0) passing = count<rows / 64, kByKey>(p, t);
    } while (t.s >= 0 && passing == 0);
    if (kByKey && t.s >= 0) {
#pragma unroll 1
      for (int member = thread_again() % 32; member < p.group; member += 32)
        sh.passing[turn()][member] = passing_by(p, t, member);
    }
    __syncwarp();
    if (thread_again() % 32 == 0) {
      t.count = passing;
      if (kByKey && t.s >= 0) {
        t.goes_on = t.line.at(p, 0, t.first / kBlock) < 0;
        t.breaks_off = t.line.at(p, p.group - 1, blocks(t.q_len) - 1) >= p.room;
      }
      barrier_arrive(&sh.found);
      barrier_wait(&sh.tile_empty, turn() ^ 1);
      if (t.s < 0) {
        barrier_arrive(&sh.tile_full);
      } else {
        barrier_expect(&sh.tile_full, 2 * rows * kDim * 2);
#pragma unroll
        for (int h = 0; h < Shared<kDim, kByKey>::halves; ++h) {
          copy_box(sh.stays[0] + h * rows * kHalf, a, h * kHalf, t.head, t.q0 + t.first, 0, &sh.tile_full);
          copy_box(sh.stays[1] + h * rows * kHalf, b, h * kHalf, t.head, t.q0 + t.first, 0, &sh.tile_full);
        }
      }
    }
    __syncwarp();
    if (t.s < 0) return;
    __syncwarp();
    if (thread_again() % 32 == 0) sh.seen.turn ^= 1;
    __syncwarp();
  }
}

// The warp that has blocks brought.
template <int kDim, bool kByKey>
__device__ __forceinline__ void bring_blocks(Shared<kDim, kByKey>& sh, const CUtensorMap* a, const CUtensorMap* b,
                                             const Problem& p) {
  constexpr int stages = Shared<kDim, kByKey>::stages, halves = Shared<kDim, kByKey>::halves;
  constexpr int bytes = 2 * kBlock * kDim * 2 + (kByKey ? 2 * kBlock * 4 : 0);
  auto lane = [] { return static_cast<int>(thread_again() % 32); };
  int stage = 0, phase = 0, waited = 0;
  for (int turn = 0;; turn ^= 1) {
    barrier_wait(&sh.found, turn);
    const Tile& t = sh.tile[turn];  // read again where it is needed: registers are short
    if (t.s < 0) return;
    __syncwarp();
    if (lane() == 0) {
      barrier_arrive(&sh.noticed);  // the next tile may be said to be found
      sh.left = t.count;
    }
#pragma unroll 1
    for (int member = 0; member < (kByKey ? p.group : 1); ++member) {
      const Passing& passing = sh.passing[turn][member];
#pragma unroll 1
      for (int block = kByKey ? passing.begin : 0; block < (kByKey ? passing.end : t.count);
           ++block, step<stages>(stage, phase)) {
        bool whole = t.q_len - block * kBlock >= kBlock;
        barrier_wait(&sh.empty[stage], phase ^ 1);
        uint64_t* full = whole ? &sh.full[stage] : &sh.on_its_way;
        if (lane() == 0) {
          if (kByKey) {
            int before = block * (block + 1) / 2 - passing.begin * (passing.begin + 1) / 2;
            sh.square[stage] = passing.square + before * p.kv_heads + (block - passing.begin) * t.head;
            sh.place[stage] = block - t.first / kBlock;
            sh.last[stage] = --sh.left == 0;
          }
          barrier_expect(full, bytes);
        }
        __syncwarp();
        if (lane() < 2 * halves) {
          int half = lane() % halves, group = p.group;
          copy_box(sh.passes[stage][lane() / halves] + half * kBlock * kHalf, lane() < halves ? a : b, half * kHalf,
                   kByKey ? t.head * group + member : t.head / group, t.q0 + block * kBlock, 0, full);
        } else if (kByKey && lane() < 2 * halves + 2) {
          int head = t.head * p.group + member, which = lane() - 2 * halves;
          int64_t at = (int64_t{head} * p.pads + t.q0 / kStatistics + t.s) * kStatistics + block * kBlock;
          copy_bytes(sh.statistics[stage][which], (which ? p.delta : p.shift) + at, kBlock * 4, full);
        }
        __syncwarp();
        if (!whole) {  // rows that are not the sequence's may be anything, which 0 times is no 0
          barrier_wait(full, waited);
          waited ^= 1;
#pragma unroll 1
          for (int x = (t.q_len - block * kBlock) * kHalf + lane() * 8; x < kBlock * kHalf; x += 32 * 8)
#pragma unroll
            for (int h = 0; h < 2 * halves; ++h)
              *reinterpret_cast<uint4*>(sh.passes[stage][0] + h * kBlock * kHalf + x) = make_uint4(0, 0, 0, 0);
          shared_written();
          __syncwarp();
          if (lane() == 0) barrier_arrive(&sh.full[stage]);
        }
      }
    }
  }
}

// Of the rows of a group that a thread has, the first; the other is 8 further.
__device__ __forceinline__ int row_again() {
  uint32_t thread = thread_again();
  return static_cast<int>(thread % 128 / 32 * 16 + thread % 32 / 4);
}

// And of the columns, in a run of 8, the first; the other is the next.
__device__ __forceinline__ int column_again() { return static_cast<int>(thread_again() % 4 * 2); }

// A product of 64 by 64 as the first operand of the next.
__device__ __forceinline__ void round(const float (&x)[32], uint32_t (&to)[4][4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) to[j][i] = pack<__nv_bfloat16>(x[8 * j + 2 * i], x[8 * j + 2 * i + 1]);
}

// A group of four warps and its 64 queries of each tile.
template <int kDim>
__device__ __forceinline__ void for_queries(Shared<kDim, false>& sh, const Problem& p) {
  constexpr int stages = Shared<kDim, false>::stages, rows = Shared<kDim, false>::rows, sums = kDim / 2;
  constexpr int steps = kDim / 16, half_step = kBlock * kHalf * 2 >> 4, other = kBlock * kDim * 2 >> 4;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  bool leads = threadIdx.x % 32 == 0;
  uint64_t k0 = operand<false>(sh.passes[0][0]), k0_by_row = operand<true>(sh.passes[0][0]);
  float factor = p.factor, s[32], dp[32], dq[sums];
  uint32_t q[steps][4], ds[4][4];
  uint64_t g0 = operand<false>(sh.stays[1]) + group * (64 * kHalf * 2 >> 4);
  int stage = 0, phase = 0, turn = 0;
  for (;;) {
    barrier_wait(&sh.tile_full, turn);
    const Tile& t = sh.tile[turn];  // read again where it is needed: registers are short
    turn ^= 1;
    if (t.s < 0) return;
    int lane = thread_again() % 32, matrix_row = group * 64 + thread_again() % 128 / 32 * 16 + lane % 16;
    uint32_t row = shared_address(sh.stays[0]) + matrix_row * kHalf * 2 + (lane / 16 ^ matrix_row % 8) * 16;  // swizzled
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      load_matrices<false>(q[i], (row ^ i % 4 * 32) + i / 4 * rows * kHalf * 2);
    }
    int begin = t.first + group * 64, n = is_here(p, t, begin / kBlock) ? begin / kBlock + 1 : 0, all = t.count;
    float shift[2], delta[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int place = begin + row_again() + 8 * h;
      int64_t at = (int64_t{t.head} * p.pads + t.q0 / kStatistics + t.s) * kStatistics + place;
      shift[h] = place < t.q_len ? p.shift[at] : 0.0f;
      delta[h] = place < t.q_len ? p.delta[at] : 0.0f;
    }
    int64_t out = (int64_t{t.q0} + begin) * p.heads + t.head;
    int left = n ? t.q_len - begin : 0;

    int offset = stage * 2 * other;
    auto multiply_next = [&] {  // begins the scores, and the product of the result's gradient and the values
      barrier_wait(&sh.full[stage], phase);
      offset = stage * 2 * other;
      products_begin();
#pragma unroll
      for (int j = 0; j < steps; ++j)
        multiply<false, false>(__nv_bfloat16(), s, q[j], k0 + offset + j / 4 * half_step + j % 4 * kNext<false>, j > 0);
      products_end();
      products_begin();
#pragma unroll
      for (int j = 0; j < steps; ++j)
        multiply<false, false>(dp, g0 + j / 4 * (rows * kHalf * 2 >> 4) + j % 4 * kNext<false>,
                               k0 + offset + other + j / 4 * half_step + j % 4 * kNext<false>, j > 0);
      products_end();
    };
    auto taken = [&](int stage) {
      if (leads) barrier_arrive(&sh.empty[stage]);
    };
#pragma unroll
    for (int x = 0; x < sums; ++x) dq[x] = 0;
    products_taken(dq);  // here, and not where products are under way
    if (n) {
      int before = -1;  // the stage of the block before
      multiply_next();
#pragma unroll 1
      for (int i = 0;;) {
        products_wait<1>();
        products_taken(s);
        if (before >= 0) taken(before);
#pragma unroll
        for (int x = 0; x < 32; ++x) s[x] = power_of_2(__fmaf_rn(s[x], factor, shift[x / 2 % 2]));
        if (i + 1 == n) {  // keys behind the query
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            int last = row_again() + 8 * h - column_again();
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
              for (int e = 0; e < 2; ++e)
                if (8 * j + e > last) s[4 * j + 2 * h + e] = 0;
          }
        }
        products_wait<0>();
        products_taken(dp);
#pragma unroll
        for (int x = 0; x < 32; ++x) s[x] = s[x] * (dp[x] - delta[x / 2 % 2]);
        round(s, ds);
        products_begin();
#pragma unroll
        for (int j = 0; j < 4; ++j)
          multiply<false, true>(__nv_bfloat16(), dq, ds[j], k0_by_row + offset + j * kNext<true>, true);
        products_end();
        before = stage;
        step<stages>(stage, phase);
        if (++i == n) break;
        multiply_next();
      }
      products_wait<0>();
      products_taken(dq);
      taken(before);
    }
#pragma unroll 1
    for (int i = n; i < all; ++i) {  // other groups' blocks
      barrier_wait(&sh.full[stage], phase);
      __syncwarp();
      taken(stage);
      step<stages>(stage, phase);
    }
    __syncwarp();
    if (leads) barrier_arrive(&sh.tile_empty);
#pragma unroll
    for (int x = 0; x < sums; ++x) dq[x] = dq[x] * p.scale;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = row_again() + 8 * h;
      store_row(dq, h, static_cast<__nv_bfloat16*>(p.dq) + (out + int64_t{row} * p.heads) * kDim, row < left);
    }
  }
}

// A group of four warps and its 64 keys of each tile.
template <int kDim>
__device__ __forceinline__ void for_keys(Shared<kDim, true>& sh, const Problem& p) {
  constexpr int stages = Shared<kDim, true>::stages, rows = Shared<kDim, true>::rows, sums = kDim / 2;
  constexpr int steps = kDim / 16, half_step = kBlock * kHalf * 2 >> 4, other = kBlock * kDim * 2 >> 4;
  constexpr int stays_half_step = rows * kHalf * 2 >> 4, stays_other = rows * kDim * 2 >> 4;
  auto arrive = [](uint64_t* b) {
    if (thread_again() % 32 == 0) barrier_arrive(b);
  };
  auto group_again = [] { return static_cast<int>(thread_again() / 128) - 1; };
  uint64_t q0 = operand<false>(sh.passes[0][0]);
  constexpr uint64_t by_row = (64 * 128 / 16 - 1) << 16;  // makes operand<true> of an operand<false>
  float s[32], dp[32], dk[sums], dv[sums];
  uint32_t probability[4][4], ds[4][4];
  int stage = 0, phase = 0;
  auto turn = [&]() -> int& { return sh.turn[thread_again() / 32]; };  // of the warp
  if (thread_again() % 32 == 0) turn() = 0;
  __syncwarp();
  for (;;) {
    barrier_wait(&sh.tile_full, turn());
    auto tile = [&]() -> const Tile& { return sh.tile[turn()]; };  // read again where it is needed: registers are short
    if (tile().s < 0) return;
    int group = __shfl_sync(~0u, static_cast<int>(thread_again() / 128), 0) - 1;
    uint64_t k0 = operand<false>(sh.stays[0]) + group * (64 * kHalf * 2 >> 4);

    int offset = 0;
    // The next block of queries that sees a key of this group.
    auto next = [&] {
      for (;;) {
        barrier_wait(&sh.full[stage], phase);
        if (sh.place[stage] >= group_again()) return true;
        bool last = sh.last[stage];
        __syncwarp();  // all have read it
        arrive(&sh.empty[stage]);
        step<stages>(stage, phase);
        if (last) return false;
      }
    };
    auto multiply_next = [&] {  // begins the scores, and the product of the values and the result's gradient
      offset = stage * 2 * other;
      products_begin();
#pragma unroll
      for (int j = 0; j < steps; ++j)
        multiply<false, false>(s, k0 + j / 4 * stays_half_step + j % 4 * kNext<false>,
                               q0 + offset + j / 4 * half_step + j % 4 * kNext<false>, j > 0);
      products_end();
      products_begin();
#pragma unroll
      for (int j = 0; j < steps; ++j)
        multiply<false, false>(dp, k0 + stays_other + j / 4 * stays_half_step + j % 4 * kNext<false>,
                               q0 + offset + other + j / 4 * half_step + j % 4 * kNext<false>, j > 0);
      products_end();
    };
    // Where sums wait for the next chunk: fours of a thread, each 128 behind the other.
    auto parked = [&] {
      const Tile& t = tile();
      int64_t block = t.q0 / kBlock + t.s + t.first / kBlock + group_again();
      int64_t at = t.head * (int64_t{p.tokens} / kBlock + p.sequences + 1) + block;
      return reinterpret_cast<float4*>(p.parked) + at * (kDim / 4) * 128 + thread_again() % 128;
    };
#pragma unroll
    for (int i = 0; i < sums / 4; ++i) {
      load_or_zero(&dk[4 * i], parked() + i * 128, tile().goes_on);
      load_or_zero(&dv[4 * i], parked() + (sums / 4 + i) * 128, tile().goes_on);
    }
    int before = -1;  // the stage of the block before
    if (next()) {
      multiply_next();
#pragma unroll 1
      for (;;) {
        products_wait<1>();
        products_taken(s);
        if (before >= 0) arrive(&sh.empty[before]);
        const float* shift = sh.statistics[stage][0] + column_again();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float2 of = *reinterpret_cast<const float2*>(shift + 8 * j);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            s[4 * j + 2 * h] = power_of_2(__fmaf_rn(s[4 * j + 2 * h], p.factor, of.x));
            s[4 * j + 2 * h + 1] = power_of_2(__fmaf_rn(s[4 * j + 2 * h + 1], p.factor, of.y));
          }
        }
        if (sh.place[stage] == group_again()) {  // queries before the key
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            int first = row_again() + 8 * h - column_again();
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
              for (int e = 0; e < 2; ++e)
                if (8 * j + e < first) s[4 * j + 2 * h + e] = 0;
          }
        }
        round(s, probability);
        products_begin();
#pragma unroll
        for (int j = 0; j < 4; ++j)
          multiply<false, true>(__nv_bfloat16(), dv, probability[j], q0 + by_row + offset + other + j * kNext<true>,
                                true);
        products_end();
        products_wait<1>();
        products_taken(dp);
        const float* delta = sh.statistics[stage][1] + column_again();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float2 of = *reinterpret_cast<const float2*>(delta + 8 * j);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            s[4 * j + 2 * h] = s[4 * j + 2 * h] * (dp[4 * j + 2 * h] - of.x);
            s[4 * j + 2 * h + 1] = s[4 * j + 2 * h + 1] * (dp[4 * j + 2 * h + 1] - of.y);
          }
        }
        round(s, ds);
        products_begin();
#pragma unroll
        for (int j = 0; j < 4; ++j)
          multiply<false, true>(__nv_bfloat16(), dk, ds[j], q0 + by_row + offset + j * kNext<true>, true);
        products_end();
        if (p.kept) {
          uint4* to = static_cast<uint4*>(p.kept) + int64_t{sh.square[stage] + group_again()} * (kSquareBytes / 16) +
                      thread_again() % 128 / 32 * 128 + thread_again() % 32;
#pragma unroll
          for (int j = 0; j < 4; ++j) __stcs(to + 32 * j, make_uint4(ds[j][0], ds[j][1], ds[j][2], ds[j][3]));
        }
        before = stage;
        step<stages>(stage, phase);
        products_wait<1>();  // for the registers of the probabilities
        if (sh.last[before] || !next()) break;
        multiply_next();
      }
      products_wait<0>();
      products_taken(dk);
      products_taken(dv);
      arrive(&sh.empty[before]);
    }
    const Tile& t = tile();
    bool breaks_off = t.breaks_off;  // what is read of the tile now, before there is another
    int here = t.q_len - t.first - group_again() * 64;  // keys of this group
    int64_t out = (int64_t{t.q0} + t.first + group_again() * 64) * p.kv_heads + t.head;
    float4* to = parked();
    __syncwarp();
    if (thread_again() % 32 == 0) {
      turn() ^= 1;
      barrier_arrive(&sh.tile_empty);
    }
    __syncwarp();
    if (breaks_off) {
      if (here > 0) {
#pragma unroll
        for (int i = 0; i < sums / 4; ++i) {
          to[i * 128] = {dk[4 * i], dk[4 * i + 1], dk[4 * i + 2], dk[4 * i + 3]};
          to[(sums / 4 + i) * 128] = {dv[4 * i], dv[4 * i + 1], dv[4 * i + 2], dv[4 * i + 3]};
        }
      }
    } else {
#pragma unroll
      for (int x = 0; x < sums; ++x) dk[x] = dk[x] * p.scale;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int row = row_again() + 8 * h;
        int64_t at = (out + int64_t{row} * p.kv_heads) * kDim;
        store_row(dk, h, static_cast<__nv_bfloat16*>(p.dk) + at, row < here);
        store_row(dv, h, static_cast<__nv_bfloat16*>(p.dv) + at, row < here);
      }
    }
  }
}

// The third kernel: what was kept, times the keys. A tile is 64 queries of a head for each of three groups of warps.

struct SumTile : Tile {
  int n[3];  // blocks of keys that each group sees; 0: its queries are not of the chunk
};

template <int kDim>
struct SumShared {
  static constexpr int groups = 3, stages = kDim == 128 ? 5 : 6, rows = groups * 64, threads = (groups + 1) * 128;
  static constexpr int halves = kDim / kHalf;
  __nv_bfloat16 k[stages][kBlock * kDim];
  uint4 squares[stages][groups][kSquareBytes / 16];
  SumTile tile[2];
  Tile found;
  Seen seen;
  uint64_t tile_full[2], tile_empty[2], full[stages], empty[stages], on_its_way;
};

// The warp that finds tiles and has keys and squares brought.
template <int kDim>
__device__ __forceinline__ void bring_squares(SumShared<kDim>& sh, const CUtensorMap* k, const Problem& p) {
  constexpr int groups = SumShared<kDim>::groups, stages = SumShared<kDim>::stages, halves = SumShared<kDim>::halves;
  constexpr int rows = SumShared<kDim>::rows, key_bytes = kBlock * kDim * 2;
  Walk<rows, false> walk(p, sh.seen);
  int lane = threadIdx.x % 32, group = p.group, stage = 0, phase = 0, waited = 0;
  for (int turn = 0, tile_phase = 0;; step<2>(turn, tile_phase)) {
    SumTile t;
    int head, all;
    int squares[groups];
    do {
      walk.next(sh.found);
      t = {sh.found, {}};
      head = t.head / group;
      all = 0;
#pragma unroll
      for (int g = 0; g < groups; ++g) {
        int block = t.first / kBlock + g;
        squares[g] = t.line.at(p, t.head % group, block) + head * (block + 1);
        t.n[g] = is_here(p, t, block) ? block + 1 : 0;
        all = max(all, t.n[g]);
      }
    } while (t.s >= 0 && all == 0);
    barrier_wait(&sh.tile_empty[turn], tile_phase ^ 1);
    if (lane == 0) {
      sh.tile[turn] = t;
      barrier_arrive(&sh.tile_full[turn]);
    }
    __syncwarp();
    if (t.s < 0) return;
#pragma unroll 1
    for (int i = 0; i < all; ++i, step<stages>(stage, phase)) {
      int left = t.q_len - i * kBlock, bytes = key_bytes;
#pragma unroll
      for (int g = 0; g < groups; ++g) bytes += i < t.n[g] ? kSquareBytes : 0;
      uint64_t* full = left >= kBlock ? &sh.full[stage] : &sh.on_its_way;
      barrier_wait(&sh.empty[stage], phase ^ 1);
      if (lane == 0) {
        barrier_expect(full, bytes);
#pragma unroll
        for (int h = 0; h < halves; ++h)
          copy_box(sh.k[stage] + h * kBlock * kHalf, k, h * kHalf, head, t.q0 + i * kBlock, 0, full);
#pragma unroll
        for (int g = 0; g < groups; ++g)
          if (i < t.n[g])
            copy_bytes(sh.squares[stage][g], static_cast<const uint8_t*>(p.kept) + int64_t{squares[g] + i} * kSquareBytes,
                       kSquareBytes, full);
      }
      __syncwarp();
      if (left < kBlock) {
        barrier_wait(full, waited);
        waited ^= 1;
#pragma unroll 1
        for (int x = left * kHalf + lane * 8; x < kBlock * kHalf; x += 32 * 8)
#pragma unroll
          for (int h = 0; h < halves; ++h)
            *reinterpret_cast<uint4*>(sh.k[stage] + h * kBlock * kHalf + x) = make_uint4(0, 0, 0, 0);
        shared_written();
        __syncwarp();
        if (lane == 0) barrier_arrive(&sh.full[stage]);
      }
    }
  }
}

template <int kDim>
__device__ __forceinline__ void sum_squares(SumShared<kDim>& sh, const Problem& p) {
  constexpr int stages = SumShared<kDim>::stages, sums = kDim / 2, stage_step = kBlock * kDim * 2 >> 4;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  bool leads = threadIdx.x % 32 == 0;
  uint64_t k0 = operand<true>(sh.k[0]);
  float dq[sums];
  uint32_t ds[4][4];
  int stage = 0, phase = 0;
  for (int turn = 0, tile_phase = 0;; step<2>(turn, tile_phase)) {
    barrier_wait(&sh.tile_full[turn], tile_phase);
    const SumTile& t = sh.tile[turn];
    if (t.s < 0) return;
    int n = t.n[group], all = max(max(t.n[0], t.n[1]), t.n[2]);
    int64_t out = (int64_t{t.q0} + t.first + group * 64) * p.heads + t.head;
    int left = t.q_len - t.first - group * 64;
    __syncwarp();
    if (leads) barrier_arrive(&sh.tile_empty[turn]);
#pragma unroll
    for (int x = 0; x < sums; ++x) dq[x] = 0;
    products_taken(dq);
    int before = -1;
    auto taken = [&](int stage) {
      if (leads) barrier_arrive(&sh.empty[stage]);
    };
#pragma unroll 1
    for (int i = 0; i < n; ++i, step<stages>(stage, phase)) {
      barrier_wait(&sh.full[stage], phase);
      uint4 square[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        square[j] = sh.squares[stage][group][j * 128 + thread_again() % 128 / 32 * 32 + thread_again() % 32];
      products_wait<0>();
      products_taken(dq);
      if (before >= 0) taken(before);
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // of keys by queries
        ds[j][0] = transposed(square[j].x);
        ds[j][1] = transposed(square[j].z);
        ds[j][2] = transposed(square[j].y);
        ds[j][3] = transposed(square[j].w);
      }
      if (i + 1 == n) {  // keys behind the query, which rows of v that are not the sequence's may have made anything
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            int seen = row_again() + x % 2 * 8 - (16 * j + x / 2 * 8 + column_again());
            ds[j][x] = seen < 0 ? 0 : seen < 1 ? ds[j][x] & 0xffff : ds[j][x];
          }
      }
      products_begin();
#pragma unroll
      for (int j = 0; j < 4; ++j)
        multiply<false, true>(__nv_bfloat16(), dq, ds[j], k0 + stage * stage_step + j * kNext<true>, true);
      products_end();
      before = stage;
    }
    products_wait<0>();
    products_taken(dq);
    if (before >= 0) taken(before);
#pragma unroll 1
    for (int i = n; i < all; ++i, step<stages>(stage, phase)) {  // other groups' blocks
      barrier_wait(&sh.full[stage], phase);
      __syncwarp();
      taken(stage);
    }
    if (n == 0) continue;
#pragma unroll
    for (int x = 0; x < sums; ++x) dq[x] = dq[x] * p.scale;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = row_again() + 8 * h;
      store_row(dq, h, static_cast<__nv_bfloat16*>(p.dq) + (out + int64_t{row} * p.heads) * kDim, row < left);
    }
  }
}

__device__ __forceinline__ void fill_with_nan(void* out, int64_t vectors) {
  constexpr uint32_t nan = 0x7fc07fc0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < vectors; i += int64_t{gridDim.x} * blockDim.x)
    static_cast<uint4*>(out)[i] = make_uint4(nan, nan, nan, nan);
}

// The first two tensors stay, the latter two pass.
template <int kDim, bool kByKey>
__global__ void __launch_bounds__(Shared<kDim, kByKey>::threads, 1)
    attention_backward(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                       const __grid_constant__ CUtensorMap c, const __grid_constant__ CUtensorMap d,
                       const __grid_constant__ Problem p) {
  static_assert(Plan<kDim, kByKey>::groups * Plan<kDim, kByKey>::many + Plan<kDim, kByKey>::few <= 3 * 168);
  extern __shared__ __align__(1024) uint8_t raw[];  // as swizzled rows are; so addresses are constants, not registers
  Shared<kDim, kByKey>& sh = *reinterpret_cast<Shared<kDim, kByKey>*>(raw);
  using plan = Plan<kDim, kByKey>;
  if (threadIdx.x == 0) {
    constexpr int warps = plan::groups * 4;
    barrier_init(&sh.found, 1);
    barrier_init(&sh.noticed, 1);
    barrier_init(&sh.tile_full, 1);
    barrier_init(&sh.tile_empty, warps);
    barrier_init(&sh.on_its_way, 1);
    for (int i = 0; i < plan::stages; ++i) {
      barrier_init(&sh.full[i], 1);
      barrier_init(&sh.empty[i], warps);
    }
    barrier_init_done();
  }
  // Where nothing is kept, by query comes first. By key needs nothing of it, so it begins where there is room, after all
  // blocks by query have seen the end of what both need; only its own end waits.
  bool at_once = kByKey && !p.kept;
  if (!at_once) wait_for_kernel_before();
  let_next_kernel_begin();
  __syncthreads();
  if (at(p.starts, 0) != 0 || at(p.starts, p.sequences) != p.tokens) {
    int64_t vectors = int64_t{p.tokens} * kDim / 8;
    if (kByKey) {
      fill_with_nan(p.dk, vectors * p.kv_heads);
      fill_with_nan(p.dv, vectors * p.kv_heads);
      if (at_once) wait_for_kernel_before();
    } else {
      fill_with_nan(p.dq, vectors * p.heads);
    }
    return;
  }
  if (threadIdx.x / 128 == 0) {
    registers_down<plan::few>();
    if (threadIdx.x < 32)
      bring_tiles(sh, &a, &b, p);
    else if (threadIdx.x < 64)
      bring_blocks(sh, &c, &d, p);
    if (at_once) wait_for_kernel_before();
  } else {
    registers_up<plan::many>();
    if constexpr (kByKey)
      for_keys(sh, p);
    else
      for_queries(sh, p);
  }
}

template <int kDim>
__global__ void __launch_bounds__(SumShared<kDim>::threads, 1)
    attention_backward_sum(const __grid_constant__ CUtensorMap k, const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  SumShared<kDim>& sh = *reinterpret_cast<SumShared<kDim>*>(raw);
  if (threadIdx.x == 0) {
    constexpr int warps = SumShared<kDim>::groups * 4;
    for (int i = 0; i < 2; ++i) {
      barrier_init(&sh.tile_full[i], 1);
      barrier_init(&sh.tile_empty[i], warps);
    }
    for (int i = 0; i < SumShared<kDim>::stages; ++i) {
      barrier_init(&sh.full[i], 1);
      barrier_init(&sh.empty[i], warps);
    }
    barrier_init(&sh.on_its_way, 1);
    barrier_init_done();
  }
  wait_for_kernel_before();
  let_next_kernel_begin();
  __syncthreads();
  if (at(p.starts, 0) != 0 || at(p.starts, p.sequences) != p.tokens)
    return fill_with_nan(p.dq, int64_t{p.tokens} * p.heads * kDim / 8);
  if (threadIdx.x < 32)
    bring_squares(sh, &k, p);
  else if (threadIdx.x >= 128)
    sum_squares(sh, p);
}

// Host.

// As many blocks of threads as there are multiprocessors, or fewer, if there are not as many tiles.
inline unsigned blocks_of(const Problem& p, int rows, int heads, int processors) {
  int64_t tiles = (int64_t{p.tokens} / rows + p.sequences) * heads;
  return static_cast<unsigned>(std::max<int64_t>(std::min<int64_t>(tiles, processors), 1));
}

template <int kDim, bool kByKey>
cudaError_t launch(const Problem& p, int processors, cudaStream_t stream) {
  using shared = Shared<kDim, kByKey>;
  constexpr int bytes = sizeof(shared);
  auto kernel = attention_backward<kDim, kByKey>;
  int query_rows = kByKey ? kBlock : shared::rows, key_rows = kByKey ? shared::rows : kBlock;
  CUtensorMap q, grad, k, v;
  if (cudaError_t e = map_of(&q, p.q, p.tokens, p.heads, kDim, 1, query_rows)) return e;
  if (cudaError_t e = map_of(&grad, p.grad, p.tokens, p.heads, kDim, 1, query_rows)) return e;
  if (cudaError_t e = map_of(&k, p.k, p.tokens, p.kv_heads, kDim, 1, key_rows)) return e;
  if (cudaError_t e = map_of(&v, p.v, p.tokens, p.kv_heads, kDim, 1, key_rows)) return e;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
  unsigned grid = blocks_of(p, shared::rows, kByKey ? p.kv_heads : p.heads, processors);
  return kByKey ? launch_early(kernel, grid, shared::threads, bytes, stream, k, v, q, grad, p)
                : launch_early(kernel, grid, shared::threads, bytes, stream, q, grad, k, v, p);
}

template <int kDim>
cudaError_t launch_sum(const Problem& p, int processors, cudaStream_t stream) {
  using shared = SumShared<kDim>;
  constexpr int bytes = sizeof(shared);
  auto kernel = attention_backward_sum<kDim>;
  CUtensorMap k;
  if (cudaError_t e = map_of(&k, p.k, p.tokens, p.kv_heads, kDim, 1, kBlock)) return e;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
  return launch_early(kernel, blocks_of(p, shared::rows, p.heads, processors), shared::threads, bytes, stream, k, p);
}

template <int kDim>
cudaError_t launch_all(const AlignkitAttentionBackward& given, cudaStream_t stream) {
  int device, processors;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return e;
  Problem p = {given, given.heads / given.kv_heads, 0};
  for (int chunk = 0; chunk < p.chunks; ++chunk, p.from += p.room) {
    if (cudaError_t e = launch<kDim, true>(p, processors, stream)) return e;
    if (cudaError_t e = launch_sum<kDim>(p, processors, stream)) return e;
  }
  if (!p.rest) return cudaSuccess;
  p.kept = nullptr;
  p.room = 1 << 30;
  if (cudaError_t e = launch<kDim, false>(p, processors, stream)) return e;
  return launch<kDim, true>(p, processors, stream);
}

}  // namespace
}  // namespace alignkit

// Returns a cudaError_t.
extern "C" int alignkit_attention_backward(const AlignkitAttentionBackward* p, cudaStream_t stream) {
  if (p->tokens < 0 || p->tokens * int64_t{p->heads} >= 1 << 30 || p->heads % p->kv_heads ||
      p->heads / p->kv_heads > alignkit::kGroup)
    return cudaErrorInvalidValue;
  if (p->dim == 128) return alignkit::launch_all<128>(*p, stream);
  if (p->dim == 64) return alignkit::launch_all<64>(*p, stream);
  return cudaErrorInvalidValue;
}
