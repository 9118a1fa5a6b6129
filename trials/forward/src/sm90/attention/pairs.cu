// Causal attention, forward: packed sequences of a training batch, and sequences of a paged cache that have many
// queries.
//
// A tile is 64 rows for each group of warps that computes: positions of one head, or fewer positions of the heads of a
// group beside each other. Two warps have the copy engine bring the tile's queries, and keys and values in blocks of 64
// positions. The sums of the leaf at hand stay in registers, those of the leaves before lie in shared memory.
//
// The tensor core has to have products to do while probabilities are computed. There are two ways, of the same bits:
// - Ahead, for heads of 128: two groups. While one computes the probabilities of a block, two of its products are under
//   way: the scores of the block after, and the sums of values of the one before. It holds the scores of two blocks,
//   and all of its queries.
// - Beside others, for heads of 64: four groups, of fewer registers. While one computes the probabilities of a block,
//   only its sums of values of the block before are under way, but other groups have products to do as well. It holds
//   the scores of one block, and of its queries a part; the tensor core reads the others from shared memory.
//
// Tiles are dealt out to as many blocks of threads as there are multiprocessors, those with most keys first, in turns
// that go to and fro. Lengths are read on the device.
#include <algorithm>

#include "../../interface.h"
#include "../ptx/barrier.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/dependent_launch.cuh"
#include "../ptx/exponential.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/pack.cuh"
#include "../ptx/thread.cuh"
#include "../ptx/wgmma.cuh"
#include "heads.cuh"

struct AlignkitAttention {
  AlignkitHeads q, k, v;
  void* out;      // [tokens, heads, dim]
  float* shift;   // statistics for the backward pass, [heads, pads * 128]; null: they are not kept
  AlignkitInts starts, kv_len, table;  // the latter two of paged sequences
  int64_t table_row, kv_rows;          // rows of k
  int page, width;                     // rows of a page, 0: k is packed as q is; pages of a sequence at most
  // Left out are paged sequences of at most `most` queries, and those of at most `few` behind at least `far` positions.
  int most, few, far;
  int tokens, sequences, heads, kv_heads, dim, pads;
  int together;  // heads of a tile: one, or all of a group
  float factor;  // of scores, for powers of 2
};

ALIGNKIT_LAYOUT(AlignkitInts, data, wide)
ALIGNKIT_LAYOUT(AlignkitHeads, data, token, head)
ALIGNKIT_LAYOUT(AlignkitAttention, q, k, v, out, shift, starts, kv_len, table, table_row, kv_rows, page, width, most,
                few, far, tokens, sequences, heads, kv_heads, dim, pads, together, factor)

namespace alignkit {
namespace {

struct Problem : AlignkitAttention {
  int part_rows;   // rows of keys that lie in one page
  int positions;   // of a tile
  int reciprocal;  // of `together`, times 2^16
  int shared;      // heads of q that share one of k

  // The position of a tile's row; there are few rows.
  __device__ int position_of(int row) const { return row * reciprocal >> 16; }
};

constexpr int kKeys = 64;         // of a block
constexpr int kLeaf = 512 / kKeys;  // blocks of a leaf
constexpr float kInfinity = __builtin_huge_valf();

constexpr int kPair = 2 * kKeys, kLeafPairs = kLeaf / 2;  // two blocks side by side

#ifndef TURNS128
#define TURNS128 1
#endif
#ifndef TURNS64
#define TURNS64 1
#endif
#ifndef HELD128
#define HELD128 0
#endif
#ifndef GROUPS64
#define GROUPS64 3
#endif

// What depends on the length of a head: how many groups of 64 rows there are, how many pairs of blocks of keys are on
// their way, registers of threads that bring them and that compute, and whether groups take turns to begin products.
template <int kDim>
struct Plan;

template <>
struct Plan<128> {
  static constexpr int groups = 2, stages = 2, few = 40, many = 232, held = HELD128;
  static constexpr bool turns = TURNS128;
};

template <>
struct Plan<64> {
  static constexpr int groups = GROUPS64, stages = 4, few = GROUPS64 == 3 ? 32 : 40, many = GROUPS64 == 3 ? 160 : 232;
  static constexpr int held = 0;
  static constexpr bool turns = TURNS64;
};

struct Tile {
  int s;  // the sequence; -1: there are no more tiles
  int q0, q_len, context;
  int first;  // position among the queries
  int head;
};

// A row's state within a leaf or over leaves: the greatest score, and the sum of probabilities.
struct State {
  float m, l;
};

template <int kDim>
struct Shared {
  static constexpr int groups = Plan<kDim>::groups, stages = Plan<kDim>::stages, rows = groups * 64;
  static constexpr int halves = kDim / kHalf, threads = (groups + 1) * 128;
  __nv_bfloat16 q[rows * kDim];
  __nv_bfloat16 k[stages][kPair * kDim];
  __nv_bfloat16 v[2 * stages][kKeys * kDim];
  float4 joined[kDim / 8][groups * 128];  // of each thread, its sums over the leaves before
  alignas(16) State whole[groups * 32][2];  // of the two rows that four lanes share, over the leaves before
  Tile tile[2];  // in turn: one is read while the next is found
  uint64_t found, q_full, q_empty, k_full[stages], k_empty[stages], v_full[2 * stages], v_empty[2 * stages];
  uint64_t on_its_way;  // values of which the producer has to wipe out rows
};

// How many blocks of keys the queries of a group see; 0: it has none.
__device__ __forceinline__ int blocks_of(const Problem& p, const Tile& t, int group) {
  int begin = t.first + p.position_of(group * 64);
  int last = min(t.q_len - 1, t.first + min(p.position_of(group * 64 + 63), p.positions - 1));
  return begin < t.q_len ? (t.context + last) / kKeys + 1 : 0;
}

template <int kGroups>
__device__ __forceinline__ int blocks_of_any(const Problem& p, const Tile& t) {
  int most = 0;
#pragma unroll 1
  for (int group = 0; group < kGroups; ++group) most = max(most, blocks_of(p, t, group));
  return most;
}

// The tiles of a block of threads, found by a whole warp. Tile j of a sequence is at level context / positions + j,
// which is about the number of its keys; tiles are counted level by level, the last one first. What is found
// is kept, or in 32 registers found again.
template <bool kKept>
struct Walk {
  const Problem& p;
  int kept, slots, level = -1, base = 0, turn = 0, before = 0;
  int q0, q_len, context, low, high;  // of the lane's sequence, the latter two its levels

  __device__ Walk(const Problem& p) : p(p), kept(threadIdx.x % 32), slots(p.heads / p.together) {
    int top = 0;
#pragma unroll 1
    for (base = 0; base < p.sequences; base += 32) {
      read();
      top = max(top, high);
    }
    for (int distance = 16; distance; distance /= 2) top = max(top, __shfl_xor_sync(~0u, top, distance));
    level = top - 1;
    base = 0;
    read();
  }

  __device__ int lane() const { return kKept ? kept : static_cast<int>(thread_again() % 32); }

  // The sequence base + lane.
  __device__ void read() {
    int s = base + lane();
    low = high = 0;
    if (s >= p.sequences) return;
    q0 = static_cast<int>(min(max(at(p.starts, s), int64_t{0}), int64_t{p.tokens}));
    q_len = static_cast<int>(min(max(at(p.starts, s + 1), int64_t{q0}), int64_t{p.tokens})) - q0;
    context = 0;
    if (p.page) {
      int64_t length = at(p.kv_len, s);
      if (length < q_len || length > int64_t{p.width} * p.page) return;
      if (q_len <= p.most || (q_len <= p.few && length - q_len >= p.far)) return;
      context = static_cast<int>(length) - q_len;
    }
    low = context / p.positions;
    high = low + (q_len + p.positions - 1) / p.positions;
  }

  __device__ Tile next() {
    int target = turn * gridDim.x + (turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    ++turn;
#pragma unroll 1
    while (level >= 0) {
      bool here = low <= level && level < high;
      unsigned all = __ballot_sync(~0u, here);
      int behind = before + __popc(all) * slots;
      if (target < behind) {
        int i = target - before, wanted = i / slots;
        int from = __ffs(__ballot_sync(~0u, here && __popc(all & ((1u << lane()) - 1)) == wanted)) - 1;
        Tile t;
        t.s = kKept ? __shfl_sync(~0u, base + lane(), from) : base + from;
        t.q0 = __shfl_sync(~0u, q0, from);
        t.q_len = __shfl_sync(~0u, q_len, from);
        t.context = __shfl_sync(~0u, context, from);
        t.first = (level - __shfl_sync(~0u, low, from)) * p.positions;
        t.head = i % slots * p.together;
        return t;
      }
      before = behind;
      base += 32;
      if (base >= p.sequences) {
        base = 0;
        --level;
      }
      if (p.sequences > 32) read();
    }
    return {-1, 0, 0, 0, 0, 0};
  }
};

// The warp that finds the tiles and has their queries brought, one ahead of those who compute.
template <int kDim>
__device__ __forceinline__ void bring_queries(Shared<kDim>& sh, const CUtensorMap* q, const Problem& p) {
  constexpr int rows = Shared<kDim>::rows;
  Walk<(Plan<kDim>::few > 32)> walk(p);
  for (int turn = 0;; turn ^= 1) {
    Tile t = walk.next();
    barrier_wait(&sh.q_empty, turn ^ 1);
    if (threadIdx.x % 32 == 0) {
      sh.tile[turn] = t;
      barrier_arrive(&sh.found);
      if (t.s < 0) {
        barrier_arrive(&sh.q_full);
      } else {
        barrier_expect(&sh.q_full, p.positions * p.together * kDim * 2);
#pragma unroll
        for (int h = 0; h < Shared<kDim>::halves; ++h)
          copy_box(sh.q + h * rows * kHalf, q, h * kHalf, t.head, t.q0 + t.first, 0, &sh.q_full);
      }
    }
    __syncwarp();
    if (t.s < 0) return;
  }
}

// The values of a block become 0 in the rows from `left` on, by a warp: rows that are not the sequence's may be
// anything, which 0 times is no 0.
template <int kDim>
__device__ __forceinline__ void wipe(__nv_bfloat16* v, int left, int lane) {
#pragma unroll 1
  for (int x = left * kHalf + lane * 8; x < kKeys * kHalf; x += 32 * 8)
#pragma unroll
    for (int h = 0; h < kDim / kHalf; ++h)
      *reinterpret_cast<uint4*>(v + h * kKeys * kHalf + x) = make_uint4(0, 0, 0, 0);
  shared_written();
  __syncwarp();
}

// The warp that has keys and values brought: a pair of blocks in parts that lie in one page each, half a head at a
// time, by a lane each. Registers are short: little is kept, and much found again.
template <int kDim>
__device__ __forceinline__ void bring_keys(Shared<kDim>& sh, const CUtensorMap* k, const CUtensorMap* v,
                                           const Problem& p) {
  constexpr int stages = Shared<kDim>::stages, halves = Shared<kDim>::halves;
  int part_rows = p.part_rows;
  // A lane's part of a pair: the first row, and times kPair the half of the head.
  auto mine = [&] { return static_cast<int>(thread_again() % 32) * part_rows; };
  uint32_t visited = 0;  // pairs
  int phases = 0;        // of the tile, and times 2 that of `on_its_way`: one register
  auto leads = [] { return thread_again() % 32 == 0; };
  auto bytes_of = [&](int rows) { return (rows + part_rows - 1) / part_rows * part_rows * kDim * 2; };
  for (;; phases ^= 1) {
    barrier_wait(&sh.found, phases % 2);
    const Tile& t = sh.tile[phases % 2];
    if (t.s < 0) return;
    int n = blocks_of_any<Shared<kDim>::groups>(p, t), head = t.head / p.shared;
    __syncwarp();
    if (leads()) barrier_arrive(&sh.q_empty);  // the next tile may be said to be found
    auto row_of = [&](int position) {
      if (!p.page) return t.q0 + position;
      if (position >= t.context + t.q_len) return 0;
      int64_t page = at(p.table, t.s * p.table_row + position / p.page);
      page = min(max(page, int64_t{0}), p.kv_rows / p.page - 1);
      return static_cast<int>(page) * p.page + position % p.page;
    };
    int row = row_of(mine() % kPair);
#pragma unroll 1
    for (int j = 0; 2 * j < n; ++j, ++visited) {
      uint32_t stage = visited % stages, phase = visited / stages % 2;
      int left = min(t.context + t.q_len, n * kKeys) - j * kPair;  // keys that there are
      int next_row = 2 * j + 2 < n ? row_of((j + 1) * kPair + mine() % kPair) : 0;  // before it is needed
      barrier_wait(&sh.k_empty[stage], phase ^ 1);
      if (leads()) barrier_expect(&sh.k_full[stage], bytes_of(min(left, kPair)));
      __syncwarp();
      if (int x = mine(); x < halves * kPair && x % kPair < left)
        copy_box(sh.k[stage] + x * kHalf, k, x / kPair * kHalf, head, row, 0, &sh.k_full[stage]);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        int rows = min(max(left - b * kKeys, 0), kKeys);
        bool whole = rows == kKeys || rows == 0;
        barrier_wait(&sh.v_empty[2 * stage + b], phase ^ 1);
        uint64_t* full = whole ? &sh.v_full[2 * stage + b] : &sh.on_its_way;
        if (leads()) barrier_expect(full, bytes_of(rows));
        __syncwarp();
        if (int x = mine(); x < halves * kPair && x % kPair < left && x / kKeys % 2 == b)
          copy_box(sh.v[2 * stage + b] + (x / kPair * kKeys + x % kKeys) * kHalf, v, x / kPair * kHalf, head, row, 0,
                   full);
        if (!whole) {
          barrier_wait(full, phases / 2);
          phases ^= 2;
          wipe<kDim>(sh.v[2 * stage + b], rows, thread_again() % 32);
          if (leads()) barrier_arrive(&sh.v_full[2 * stage + b]);
        }
      }
      row = next_row;
    }
  }
}

// Of the scores of a pair of blocks, the greatest of each block and row. A thread has two rows, of each four lanes the
// same.
__device__ __forceinline__ void greatest(const float (&s)[64], float (&top)[2][2]) {
#pragma unroll
  for (int b = 0; b < 2; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        most[e] = s[32 * b + 2 * h + e];
#pragma unroll
        for (int j = 1; j < 8; ++j) most[e] = fmaxf(most[e], s[32 * b + 4 * j + 2 * h + e]);
      }
      top[b][h] = fmaxf(most[0], most[1]);
    }
#pragma unroll
  for (int distance = 2; distance; distance /= 2)
#pragma unroll
    for (int b = 0; b < 2; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) top[b][h] = fmaxf(top[b][h], __shfl_xor_sync(~0u, top[b][h], distance));
}

// The scores of a block of the pair become probabilities, of which `total` is the thread's sum.
template <int kBlock>
__device__ __forceinline__ void probabilities(float (&s)[64], const float (&shift)[2], uint32_t (&total)[2],
                                              float factor) {
  total[0] = total[1] = 0;
#pragma unroll
  for (int x = 0; x < 32; ++x) {
    float& a = s[32 * kBlock + x];
    a = power_of_2(__fmaf_rn(a, factor, shift[x / 2 % 2]));
    // 1 + p is p rounded to a multiple of 2^-23, in the low bits; the sum of the ones leaves modulo 2^32.
    total[x / 2 % 2] += __float_as_uint(a + 1.0f);
  }
}

// The sums of a block's probabilities join those of the blocks before.
__device__ __forceinline__ void settle(State (&row)[2], const float (&alpha)[2], uint32_t (&total)[2]) {
#pragma unroll
  for (int distance = 2; distance; distance /= 2)
#pragma unroll
    for (int h = 0; h < 2; ++h) total[h] += __shfl_xor_sync(~0u, total[h], distance);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    total[h] -= static_cast<uint32_t>(uint64_t{kKeys} * 0x3f800000);
    row[h].l = __fmaf_rn(row[h].l, alpha[h], __uint2float_rn(total[h]) * 0x1p-23f);
  }
}

// The scores of keys behind the row's own position; `limit` is that, from the thread's first key on.
__device__ __forceinline__ void hide(float (&s)[64], int h, int limit) {
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (8 * j + e > limit) s[4 * j + 2 * h + e] = -kInfinity;
}

// A leaf's state joins that of the leaves before; what multiplies the sums of either.
struct Join {
  float whole, leaf;
};

__device__ __forceinline__ Join join(State& whole, const State& leaf, float factor, bool first) {
  if (first) {  // -0 and it
    whole = leaf;
    return {1, 1};
  }
  float top = fmaxf(whole.m, leaf.m);
  Join j = {power_of_2((whole.m - top) * factor), power_of_2((leaf.m - top) * factor)};
  whole.l = __fmaf_rn(whole.l, j.whole, leaf.l * j.leaf);
  whole.m = top;
  return j;
}

// x / by, rounded once, for x[2 h], x[2 h + 1], x[2 h + 4], ...: as division does it where nothing is near the ends of
// the range, but with the reciprocal found once.
template <int kCount>
__device__ __forceinline__ void divide(float (&x)[kCount], int h, float by) {
  float least = kInfinity;
#pragma unroll
  for (int i = 0; i < kCount; i += 4) least = fminf(least, fminf(fabsf(x[i + 2 * h]), fabsf(x[i + 2 * h + 1])));
  if (by >= 0.5f && by < 0x1p40f && least > 0x1p-60f) {
    float twice = by < 1 ? 2.0f : 1.0f;  // so that no quotient overflows before its last rounding
    by *= twice;
    float r = __frcp_rn(by);
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& a = x[i + 2 * h + e];
        float q = a * r;
        q = __fmaf_rn(__fmaf_rn(-by, q, a), r, q);
        a = __fmaf_rn(__fmaf_rn(-by, q, a), r, q) * twice;
      }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& a = x[i + 2 * h + e];
        a = __fdiv_rn(a, by + a * 0.0f);
      }
  }
}

// A group of four warps and its 64 rows of each tile.
template <int kDim>
__device__ __forceinline__ void attend(Shared<kDim>& sh, const Problem& p) {
  constexpr int stages = Shared<kDim>::stages, rows = Shared<kDim>::rows, sums = kDim / 2, steps = kDim / 16;
  constexpr int block_step = kKeys * kDim * 2 >> 4, groups = Plan<kDim>::groups;
  constexpr bool held = Plan<kDim>::held > 0;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  bool leads = threadIdx.x % 32 == 0;
  // Of the rows of the tile that a thread has, the first; the other is 8 further.
  auto first_row = [&] {
    uint32_t thread = thread_again();
    return static_cast<int>(group * 64 + thread % 128 / 32 * 16 + thread % 32 / 4);
  };
  uint64_t q0 = operand<false>(sh.q + group * 64 * kHalf), k0 = operand<false>(sh.k[0]), v0 = operand<true>(sh.v[0]);
  float factor = p.factor;
  uint32_t visited = 0;  // pairs of the tiles before
  int q_phase = 0;
  float s[64], acc[sums];
  uint32_t probability[8][4], q[held ? steps : 1][4];
#pragma unroll
  for (int i = 0; i < sums; ++i) acc[i] = 0;
  // Groups begin products one after the other, so that one has products while another computes probabilities.
  auto turn_begin = [&] {
    if (Plan<kDim>::turns) named_barrier_sync(1 + group, 256);
  };
  auto turn_end = [&] {
    if (Plan<kDim>::turns) named_barrier_arrive(group + 1 < groups ? 2 + group : 1, 256);
  };
  if (group == groups - 1) turn_end();
  for (;;) {
    barrier_wait(&sh.q_full, q_phase);
    const Tile& t = sh.tile[q_phase];  // read again where it is needed: registers are short
    q_phase ^= 1;
    if (t.s < 0) break;
    auto queries_taken = [&] {
      if (leads) barrier_arrive(&sh.q_empty);
    };
    if constexpr (held) {
      int lane = thread_again() % 32, matrix_row = group * 64 + thread_again() % 128 / 32 * 16 + lane % 16;
      uint32_t q_row = shared_address(sh.q) + matrix_row * kHalf * 2 + (lane / 16 ^ matrix_row % 8) * 16;  // swizzled
#pragma unroll
      for (int i = 0; i < steps; ++i)
        load_matrices<false>(q[i], (q_row ^ i % 4 * 32) + i / 4 * rows * kHalf * 2);
      __syncwarp();
      queries_taken();
    }

    int n = blocks_of(p, t, group);
    int plain = (t.context + t.first + p.position_of(group * 64) + 1) / kKeys;  // blocks that all rows see all of
    auto position_of = [&](int h) { return t.context + t.first + p.position_of(first_row() + 8 * h); };
    State row[2] = {{-kInfinity, 0}, {-kInfinity, 0}};
    float alpha[2][2];  // of the blocks of a pair, the factors of what was summed before

    int pairs = (n + 1) / 2;
    auto stage_of = [&](int j) { return static_cast<int>((visited + j) % stages); };
    auto phase_of = [&](int j) { return static_cast<int>((visited + j) / stages % 2); };
    auto wait_for_keys = [&](int j) { barrier_wait(&sh.k_full[stage_of(j)], phase_of(j)); };
    auto wait_for_values = [&](int j, int b) { barrier_wait(&sh.v_full[2 * stage_of(j) + b], phase_of(j)); };
    auto keys_taken = [&](int j) {
      if (leads) barrier_arrive(&sh.k_empty[stage_of(j)]);
    };
    auto values_taken = [&](int j, int b) {
      if (leads) barrier_arrive(&sh.v_empty[2 * stage_of(j) + b]);
    };
    auto score = [&](int j) {  // begins
      uint64_t k = k0 + stage_of(j) * 2 * block_step;
      constexpr int q_half = rows * kHalf * 2 >> 4, k_half = kPair * kHalf * 2 >> 4;
      products_begin();
#pragma unroll
      for (int x = 0; x < steps; ++x)
        if constexpr (held)
          multiply<false, false>(__nv_bfloat16(), s, q[x], k + x / 4 * k_half + x % 4 * kNext<false>, x > 0);
        else
          multiply<false, false>(s, q0 + x / 4 * q_half + x % 4 * kNext<false>,
                                 k + x / 4 * k_half + x % 4 * kNext<false>, x > 0);
      products_end();
    };
    auto sum = [&](int j, int b) {  // begins
      uint64_t v = v0 + (2 * stage_of(j) + b) * block_step;
      bool more = b > 0 || j % kLeafPairs > 0;
      products_begin();
#pragma unroll
      for (int x = 0; x < 4; ++x)
        multiply<false, true>(__nv_bfloat16(), acc, probability[4 * b + x], v + x * kNext<true>, more || x > 0);
      products_end();
    };
    auto scale = [&](const float (&by)[2]) {
#pragma unroll
      for (int x = 0; x < sums; ++x) acc[x] = acc[x] * by[x / 2 % 2];
    };
    auto round = [&] {
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          probability[j][i] = pack<__nv_bfloat16>(s[8 * j + 2 * i], s[8 * j + 2 * i + 1]);
    };
    // Of pair j, whose scores are in s, the probabilities; after those of its first block, `between`.
    auto weigh = [&](int j, auto between) {
      if (2 * j + 2 > plain) {
        int first = j * kPair + static_cast<int>(thread_again() % 4 * 2);
#pragma unroll
        for (int h = 0; h < 2; ++h) hide(s, h, position_of(h) - first);
      }
      float top[2][2], shift[2][2], next[2][2];
      uint32_t total[2];
      greatest(s, top);
#pragma unroll
      for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float most = fmaxf(row[h].m, top[b][h]);
          shift[b][h] = -most * factor;
          next[b][h] = power_of_2((row[h].m - most) * factor);
          row[h].m = most;
        }
      // Shuffles and branches, across which the assembler moves no wait for products, up to before the probabilities.
      probabilities<0>(s, shift[0], total, factor);
      settle(row, next[0], total);
      between();
      probabilities<1>(s, shift[1], total, factor);
      settle(row, next[1], total);
#pragma unroll
      for (int b = 0; b < 2; ++b)
#pragma unroll
        for (int h = 0; h < 2; ++h) alpha[b][h] = next[b][h];
      products_taken(s);
      wait_for_values(j, 0);
    };
    // At a leaf's end its state joins that of the leaves before, and its sums do when they are there.
    Join at_end[2];
    auto whole = [&](int h) -> State& { return sh.whole[thread_again() / 4 - 32][h]; };
    auto end_leaf = [&](int j) {
      State all[2] = {whole(0), whole(1)};
      __syncwarp();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        at_end[h] = join(all[h], row[h], factor, j == kLeafPairs);
        whole(h) = all[h];
        row[h] = {-kInfinity, 0};
      }
      __syncwarp();
    };
    auto joined = [&](int x) -> float4& { return sh.joined[x][thread_again() - 128]; };
    // What is there before pair j is added.
    auto make_room = [&](int j) {
      if (j % kLeafPairs) {
        scale(alpha[0]);
      } else if (j == kLeafPairs) {
#pragma unroll
        for (int x = 0; x < sums; x += 4) joined(x / 4) = make_float4(acc[x], acc[x + 1], acc[x + 2], acc[x + 3]);
      } else if (j) {
#pragma unroll
        for (int x = 0; x < sums; x += 4) {
          float4 to = joined(x / 4);
          to.x = __fmaf_rn(to.x, at_end[0].whole, acc[x] * at_end[0].leaf);
          to.y = __fmaf_rn(to.y, at_end[0].whole, acc[x + 1] * at_end[0].leaf);
          to.z = __fmaf_rn(to.z, at_end[1].whole, acc[x + 2] * at_end[1].leaf);
          to.w = __fmaf_rn(to.w, at_end[1].whole, acc[x + 3] * at_end[1].leaf);
          joined(x / 4) = to;
        }
      }
    };

    if (n) {
      wait_for_keys(0);
      turn_begin();
      score(0);
      turn_end();
      products_wait<0>();
      products_taken(s);
      keys_taken(0);
      if (!held && pairs == 1) queries_taken();
      weigh(0, [] {});
      round();
#pragma unroll 1
      for (int j = 1; j < pairs; ++j) {
        wait_for_keys(j);
        turn_begin();
        score(j);
        make_room(j - 1);
        sum(j - 1, 0);
        turn_end();
        if (j % kLeafPairs == 0) end_leaf(j);
        products_wait<1>();
        products_taken(s);
        keys_taken(j);
        if (!held && j + 1 == pairs) queries_taken();
        weigh(j, [&] {
          products_taken(s);
          wait_for_values(j - 1, 1);
          products_wait<0>();
          products_taken(acc);
          values_taken(j - 1, 0);
          scale(alpha[1]);
          sum(j - 1, 1);
          wait_for_values(j, 0);
        });
        products_wait<0>();
        products_taken(acc);
        values_taken(j - 1, 1);
        round();
      }
      int last = pairs - 1;
      make_room(last);
      sum(last, 0);
      wait_for_values(last, 1);
      products_wait<0>();
      products_taken(acc);
      values_taken(last, 0);
      if (n % 2 == 0) {
        scale(alpha[1]);
        sum(last, 1);
        products_wait<0>();
        products_taken(acc);
      }
      values_taken(last, 1);
    } else if (!held) {
      queries_taken();
    }
    int all = (blocks_of_any<groups>(p, t) + 1) / 2;
#pragma unroll 1
    for (int j = pairs; j < all; ++j) {  // other groups' pairs
      wait_for_keys(j);
      keys_taken(j);
      turn_begin();
      turn_end();
      for (int b = 0; b < 2; ++b) {
        wait_for_values(j, b);
        values_taken(j, b);
      }
    }
    visited += all;
    if (n == 0) continue;

    int begin = (n - 1) / kLeaf * kLeaf * kKeys;  // of the last leaf
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int position = position_of(h);
      bool seen = position >= begin;
      Join last = {1, 0};
      State all_leaves = row[h];
      if (begin) {
        all_leaves = whole(h);
        if (seen) last = join(all_leaves, row[h], factor, false);
#pragma unroll
        for (int x = 2 * h; x < sums; x += 4) {
          const float2& before = reinterpret_cast<const float2*>(&joined(x / 4))[h];
          acc[x] = seen ? __fmaf_rn(before.x, last.whole, acc[x] * last.leaf) : before.x;
          acc[x + 1] = seen ? __fmaf_rn(before.y, last.whole, acc[x + 1] * last.leaf) : before.y;
        }
      }
      divide(acc, h, all_leaves.l);
      int r = first_row() + 8 * h, place = position - t.context;  // among the queries
      bool here = place < t.q_len && r < p.positions * p.together;
      int64_t head = t.head + r - p.position_of(r) * p.together;
      int64_t at = ((t.q0 + place) * int64_t{p.heads} + head) * kDim;
      store_row(acc, h, static_cast<__nv_bfloat16*>(p.out) + at, here);
      if (p.shift && here && thread_again() % 4 == 0)
        p.shift[(head * p.pads + t.q0 / kStatistics + t.s) * kStatistics + place] =
            __fmaf_rn(-all_leaves.m, factor, -log2f(all_leaves.l));
    }
  }
  if (group == 0) turn_begin();  // the last one's end
}

template <int kDim>
__global__ void __launch_bounds__(Shared<kDim>::threads, 1)
    attention_forward(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                      const __grid_constant__ CUtensorMap v, const Problem p) {
  extern __shared__ __align__(1024) uint8_t raw[];  // as swizzled rows are; so addresses are constants, not registers
  Shared<kDim>& sh = *reinterpret_cast<Shared<kDim>*>(raw);
  if (threadIdx.x == 0) {
    constexpr int warps = Shared<kDim>::groups * 4;
    barrier_init(&sh.found, 1);
    barrier_init(&sh.q_full, 1);
    barrier_init(&sh.q_empty, warps + 1);
    barrier_init(&sh.on_its_way, 1);
    for (int i = 0; i < Shared<kDim>::stages; ++i) {
      barrier_init(&sh.k_full[i], 1);
      barrier_init(&sh.k_empty[i], warps);
      for (int b = 0; b < 2; ++b) {
        barrier_init(&sh.v_full[2 * i + b], 1);
        barrier_init(&sh.v_empty[2 * i + b], warps);
      }
    }
    barrier_init_done();
  }
  wait_for_kernel_before();
  let_next_kernel_begin();
  __syncthreads();
  int64_t begin = at(p.starts, 0), end = at(p.starts, p.sequences);
  if (begin != 0 || end > p.tokens || (!p.page && end != p.tokens)) {
    if (p.page) return;  // of a cache it is others who fill rows
    int64_t vectors = int64_t{p.tokens} * p.heads * kDim / 8;
    constexpr uint32_t nan = 0x7fc07fc0;
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < vectors; i += int64_t{gridDim.x} * blockDim.x)
      static_cast<uint4*>(p.out)[i] = make_uint4(nan, nan, nan, nan);
    return;
  }
  if (threadIdx.x / 128 == 0) {
    registers_down<Plan<kDim>::few>();
    if (threadIdx.x < 32)
      bring_queries(sh, &q, p);
    else if (threadIdx.x < 64)
      bring_keys(sh, &k, &v, p);
  } else {
    registers_up<Plan<kDim>::many>();
    attend<kDim>(sh, p);
  }
}

// Host.

// A page, or a block of keys, is of whole parts.
inline int part_rows_of(const AlignkitAttention& p) {
  int part = kKeys;
  while (p.page % part) part /= 2;
  return part;
}

template <int kDim>
cudaError_t launch(const AlignkitAttention& given, cudaStream_t stream) {
  constexpr int rows = Shared<kDim>::rows, bytes = sizeof(Shared<kDim>);
  Problem p = {given, part_rows_of(given), rows / given.together, (1 << 16) / given.together + 1,
               given.heads / given.kv_heads};
  int device, processors;
  CUtensorMap q, k, v;
  if (cudaError_t e = map_of(&q, p.q, p.tokens, p.heads, kDim, p.together, p.positions)) return e;
  if (cudaError_t e = map_of(&k, p.k, p.kv_rows, p.kv_heads, kDim, 1, p.part_rows)) return e;
  if (cudaError_t e = map_of(&v, p.v, p.kv_rows, p.kv_heads, kDim, 1, p.part_rows)) return e;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return e;
  if (cudaError_t e =
          cudaFuncSetAttribute(attention_forward<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
    return e;
  int64_t tiles = (int64_t{p.tokens} / p.positions + p.sequences) * (p.heads / p.together);
  unsigned blocks = static_cast<unsigned>(std::max<int64_t>(std::min<int64_t>(tiles, processors), 1));
  return launch_early(attention_forward<kDim>, blocks, Shared<kDim>::threads, bytes, stream, q, k, v, p);
}

}  // namespace
}  // namespace alignkit

// Returns a cudaError_t.
extern "C" int alignkit_attention_forward(const AlignkitAttention* p, cudaStream_t stream) {
  if (p->page % 16 || p->tokens < 0 || p->tokens * int64_t{p->heads} >= 1 << 30 || p->heads % p->kv_heads ||
      (p->together != 1 && p->together * p->kv_heads != p->heads) || p->together > 64)
    return cudaErrorInvalidValue;
  using alignkit::launch;
  if (p->dim == 128) return launch<128>(*p, stream);
  if (p->dim == 64) return launch<64>(*p, stream);
  return cudaErrorInvalidValue;
}
