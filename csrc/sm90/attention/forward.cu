// Causal attention, forward: packed sequences of a training batch, and sequences of a paged cache that have many
// queries.
//
// A tile is 64 rows for each group of warps that computes: positions of one head, or fewer positions of the heads of a
// group beside each other. Three warps have the copy engine bring the tile's queries, and keys and values in blocks of 128
// positions.
//
// A group has the tensor core compute its sums of values of a block, then its scores of the next one. Meanwhile another
// group makes probabilities of its scores; they take turns. So those must be few instructions: a multiplication, a power
// of 2 and half a conversion each. Their maximum is not looked for, and their sum is that of a column of ones beside the
// values. (Heads of 256 leave no registers for scores beside sums and probabilities: there scores begin when the sums are
// done.)
//
// Tiles are dealt out to as many blocks of threads as there are multiprocessors, those with most keys first, in turns
// that go to and fro. Lengths are read on the device.
#include <algorithm>

#include "../../interface.h"
#include "../ptx/barrier.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/dependent_launch.cuh"
#include "../ptx/exponential.cuh"
#include "../ptx/memory.cuh"
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
  float4* joined;  // see Plan: what lies in memory, for each block of threads

  // The position of a tile's row; there are few rows.
  __device__ int position_of(int row) const { return row * reciprocal >> 16; }
};

constexpr int kKeys = 128;          // of a block
constexpr int kLeaf = 512 / kKeys;  // blocks of a leaf
// A probability is 2^-31 where a score is what scores are measured by: the leaf's first, and where a rounded one would be 2
// or more, as the uppermost bit of its exponent says, the greatest of that block.
constexpr float kReserve = 31;
constexpr uint32_t kTooGreat = 0x40004000;  // of two rounded ones
constexpr float kInfinity = __builtin_huge_valf();

// Whether a probability is.
__device__ __forceinline__ bool too_great(float power) {
  return (pack<__nv_bfloat16>(power, 0.0f) & kTooGreat) != 0;
}

// What is added to scores of the leaves before and of the next one together, from what is added to those of each; `before`
// and `after` are what multiplies the sums of each.
__device__ __forceinline__ float meet(float of_those, float of_next, float& before, float& after) {
  float to = of_those - of_next <= kReserve ? of_those : of_next;
  before = power_of_2(to - of_those);
  after = power_of_2(to - of_next);
  return to;
}

// What depends on the length of a head: how many groups of 64 rows there are, how many blocks of keys are on their way,
// registers of threads that bring them and that compute, and how many of its sums over the leaves before a thread has in
// registers; the others lie in shared memory, but `elsewhere` vectors of four, which lie in memory. ahead: a block's
// scores begin before the sums of the block before are done; it takes registers for both.
template <int kDim>
struct Plan;

template <>
struct Plan<256> {
  static constexpr int groups = 2, stages = 1, few = 40, many = 232, held = 0, elsewhere = 25;
  static constexpr bool ahead = false;
};

template <>
struct Plan<128> {
  static constexpr int groups = 2, stages = 2, few = 40, many = 232, held = 56, elsewhere = 0;
  static constexpr bool ahead = true;
};

template <>
struct Plan<96> {
  static constexpr int groups = 2, stages = 2, few = 40, many = 232, held = 48, elsewhere = 0;
  static constexpr bool ahead = true;
};

template <>
struct Plan<64> {
  static constexpr int groups = 3, stages = 3, few = 32, many = 160, held = 0, elsewhere = 0;
  static constexpr bool ahead = true;
};

struct Tile {
  int s;  // the sequence; -1: there are no more tiles
  int q0, q_len, context;
  int first;  // position among the queries
  int head;
};

template <int kDim>
struct Shared {
  using Plan = alignkit::Plan<kDim>;
  static constexpr int groups = Plan::groups, stages = Plan::stages, rows = groups * 64, threads = (groups + 1) * 128;
  static_assert(kRegistersSuffice<Plan::few, Plan::many, groups>);
  static constexpr int halves = kHalves<kDim>, width = halves * kHalf;
  // Ones are beside the values: a half of their own, or in the part of the last half that no values take. Where a product
  // has no columns left, apart.
  static constexpr bool ones_within = kDim % kHalf != 0, ones_apart = kDim == 256;
  static constexpr int ones = (ones_within ? 0 : ones_apart ? 16 : kKeys) * kHalf;  // elements
  // A thread's sums of values, and how many vectors of those over the leaves before lie in shared memory.
  static constexpr int sums = kDim / 2, parked = (sums - Plan::held) / 4 - Plan::elsewhere;
  __nv_bfloat16 q[rows * width];
  __nv_bfloat16 k[stages][kKeys * width];
  __nv_bfloat16 v[stages][kKeys * width + ones];
  float4 joined[parked > 0 ? parked : 1][groups * 128];  // of each thread, its sums over the leaves before
  // Of the two rows that four lanes share, over the leaves before: what is added to a score, and the sum of probabilities.
  alignas(16) float2 whole[groups * 32][2];
  Tile tile[2];  // in turn: one is read while the next is found
  uint64_t found, q_full, q_empty, k_full[stages], k_empty[stages], v_full[stages], v_empty[stages];
  uint64_t on_its_way;  // values of which the producer has to wipe out rows, or to write ones beside them
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
// which is about the number of its keys; tiles are counted level by level, the last one first.
struct Walk {
  const Problem& p;
  int slots, level = -1, base = 0, turn = 0, before = 0;
  int q0, q_len, context, low, high;  // of the lane's sequence, the latter two its levels

  __device__ Walk(const Problem& p) : p(p), slots(p.heads / p.together) {
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

  __device__ int lane() const { return static_cast<int>(thread_again() % 32); }  // there are few registers

  // The sequence base + lane.
  __device__ void read() {
    int s = base + lane();
    low = high = 0;
    if (s >= p.sequences) return;
    rows_of(p.starts, s, p.tokens, q0, q_len);
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
        t.s = base + from;
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
  Walk walk(p);
  for (int turn = 0;; turn ^= 1) {
    Tile t = walk.next();
    barrier_wait(&sh.q_empty, turn ^ 1);
    if (threadIdx.x % 32 == 0) {
      sh.tile[turn] = t;
      barrier_arrive(&sh.found);
      if (t.s < 0) {
        barrier_arrive(&sh.q_full);
      } else {
        barrier_expect(&sh.q_full, p.positions * p.together * Shared<kDim>::width * 2);
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
    for (int h = 0; h < kHalves<kDim>; ++h)
      *reinterpret_cast<uint4*>(v + h * kKeys * kHalf + x) = make_uint4(0, 0, 0, 0);
}

// Eight columns of ones behind the values of a block, by a warp: 16 bytes of each swizzled row of the last half.
template <int kDim>
__device__ __forceinline__ void fill_ones(__nv_bfloat16* v, int lane) {
  constexpr int vector = kDim % kHalf / 8;
#pragma unroll 1
  for (int row = lane; row < kKeys; row += 32)
    *reinterpret_cast<uint4*>(v + kDim / kHalf * kKeys * kHalf + row * kHalf + (vector ^ row % 8) * 8) =
        make_uint4(0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80);
}

// A warp that has keys brought, or values: a block in parts that lie in one page each, half a head at a time, by a lane
// each. There are few registers: little is kept, and more found again.
template <int kDim, bool kValues>
__device__ __forceinline__ void bring_rows(Shared<kDim>& sh, const CUtensorMap* map, const Problem& p) {
  constexpr int stages = Shared<kDim>::stages, halves = Shared<kDim>::halves, row_bytes = Shared<kDim>::width * 2;
  constexpr bool ones_within = kValues && Shared<kDim>::ones_within;
  int part_rows = p.part_rows, parts = kKeys / part_rows, first = threadIdx.x % 32 % parts * part_rows;
  auto& is_full = kValues ? sh.v_full : sh.k_full;
  auto& is_empty = kValues ? sh.v_empty : sh.k_empty;
  uint32_t visited = 0;  // blocks
  int phases = 0;        // of the tile, and times 2 that of `on_its_way`: one register
  auto leads = [] { return thread_again() % 32 == 0; };
  auto half = [&] { return static_cast<int>(thread_again() % 32) / parts; };
  for (;; phases ^= 1) {
    barrier_wait(&sh.found, phases % 2);
    const Tile& t = sh.tile[phases % 2];
    if (t.s < 0) return;
    int n = blocks_of_any<Shared<kDim>::groups>(p, t), head = t.head / p.shared;
    auto end = [&] { return t.context + t.q_len; };  // read again, while registers are short
    __syncwarp();
    if (leads()) barrier_arrive(&sh.q_empty);  // the next tile may be said to be found
    auto row_of = [&](int position) {
      if (!p.page) return t.q0 + position;
      if (position >= end()) return 0;
      int64_t page = at(p.table, t.s * p.table_row + position / p.page);
      page = min(max(page, int64_t{0}), p.kv_rows / p.page - 1);
      return static_cast<int>(page) * p.page + position % p.page;
    };
    int row = row_of(first);
#pragma unroll 1
    for (int i = 0; i < n; ++i, ++visited) {
      uint32_t stage = visited % stages, phase = visited / stages % 2;
      int left = end() - i * kKeys, bytes = min(parts, (left + part_rows - 1) / part_rows) * part_rows * row_bytes;
      bool here = half() < halves && first < left, wipes = kValues && left < kKeys, writes = wipes || ones_within;
      int next_row = i + 1 < n ? row_of((i + 1) * kKeys + first) : 0;  // before it is needed
      barrier_wait(is_empty + stage, phase ^ 1);
      uint64_t* full = writes ? &sh.on_its_way : is_full + stage;
      if (leads()) barrier_expect(full, bytes);
      __syncwarp();
      __nv_bfloat16* to = (kValues ? sh.v[stage] : sh.k[stage]) + (half() * kKeys + first) * kHalf;
      if (here) copy_box(to, map, half() * kHalf, head, row, 0, full);
      if (writes) {
        barrier_wait(full, phases / 2);
        phases ^= 2;
        if (wipes) wipe<kDim>(sh.v[stage], left, thread_again() % 32);
        if (ones_within) {
          __syncwarp();
          fill_ones<kDim>(sh.v[stage], thread_again() % 32);
        }
        shared_written();
        __syncwarp();
        if (leads()) barrier_arrive(is_full + stage);
      }
      row = next_row;
    }
  }
}

// The greatest scores of a thread's two rows, of each of which four lanes have a part.
__device__ __forceinline__ void greatest(const float (&s)[kKeys / 2], float (&top)[2]) {
  float part[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
  for (int j = 1; j < kKeys / 8; ++j)
#pragma unroll
    for (int x = 0; x < 4; ++x) part[x] = fmaxf(part[x], s[4 * j + x]);
#pragma unroll
  for (int h = 0; h < 2; ++h) top[h] = fmaxf(part[2 * h], part[2 * h + 1]);
}

// Of a row's four lanes.
__device__ __forceinline__ float greatest_of_row(float top) {
#pragma unroll
  for (int distance = 2; distance; distance /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
  return top;
}

// The scores of keys behind the row's own position; `limit` is that, from the thread's first key on.
__device__ __forceinline__ void hide(float (&s)[kKeys / 2], int h, int limit) {
#pragma unroll
  for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (8 * j + e > limit) s[4 * j + 2 * h + e] = -kInfinity;
}

// x / by, rounded once, for x[2 h], x[2 h + 1], x[2 h + 4], ...: as division does it where nothing is near the ends of
// the range, but with the reciprocal found once.
template <int kCount, int kSize>
__device__ __forceinline__ void divide(float (&x)[kSize], int h, float by) {
  float least = kInfinity, most = 0;
#pragma unroll
  for (int i = 0; i < kCount; i += 4)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      least = fminf(least, fabsf(x[i + 2 * h + e]));
      most = fmaxf(most, fabsf(x[i + 2 * h + e]));
    }
  if (by >= 0x1p-31f && by < 0x1p44f && least > 0x1p-80f && most < 0x1p64f) {
    constexpr float more = 0x1p32f;  // for both
    by *= more;
    float r = __frcp_rn(by);
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& a = x[i + 2 * h + e];
        float b = a * more, q = b * r;
        q = __fmaf_rn(__fmaf_rn(-by, q, b), r, q);
        a = __fmaf_rn(__fmaf_rn(-by, q, b), r, q);
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
  constexpr int stages = Shared<kDim>::stages, rows = Shared<kDim>::rows, steps = kDim / 16;
  constexpr int sums = Shared<kDim>::sums, held = Shared<kDim>::Plan::held, groups = Shared<kDim>::groups;
  constexpr bool ones_apart = Shared<kDim>::ones_apart, ahead = Shared<kDim>::Plan::ahead;
  constexpr int elsewhere = Shared<kDim>::Plan::elsewhere;
  constexpr int near = sums - 4 * elsewhere;  // sums over the leaves before that do not lie in memory
  constexpr int k_step = sizeof(sh.k[0]) >> 4, v_step = sizeof(sh.v[0]) >> 4;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  bool leads = threadIdx.x % 32 == 0;
  // Of the rows of the tile that a thread has, the first; the other is 8 further.
  auto first_row = [&] {
    uint32_t thread = thread_again();
    return static_cast<int>(group * 64 + thread % 128 / 32 * 16 + thread % 32 / 4);
  };
  uint64_t q0 = operand<false>(sh.q + group * 64 * kHalf), k0 = operand<false>(sh.k[0]), v0 = operand<true>(sh.v[0], kKeys);
  float factor = p.factor;
  uint32_t visited = 0;  // blocks of the tiles before
  int q_phase = 0;
  float s[kKeys / 2];    // scores of a block
  float acc[sums + 4];   // sums of the leaf at hand; the last four are two rows' sums of probabilities, each twice
  float all[held + 1];   // of the leaves before
  uint32_t probability[kKeys / 16][4];
#pragma unroll
  for (int x = 0; x < sums + 4; ++x) acc[x] = 0;
  // Turns to begin products: a group's when the group before it has begun its own.
  auto turn_begin = [&] { named_barrier_sync(1 + group, 256); };
  auto turn_end = [&] { named_barrier_arrive(group + 1 < groups ? 2 + group : 1, 256); };
  if (group == groups - 1) turn_end();
  for (;;) {
    barrier_wait(&sh.q_full, q_phase);
    const Tile& t = sh.tile[q_phase];  // read again where it is needed: registers are short
    q_phase ^= 1;
    if (t.s < 0) break;
    auto queries_taken = [&] {
      if (leads) barrier_arrive(&sh.q_empty);
    };
    int n = blocks_of(p, t, group);
    int plain = (t.context + t.first + p.position_of(group * 64) + 1) / kKeys;  // blocks that all rows see all of
    auto position_of = [&](int h) { return t.context + t.first + p.position_of(first_row() + 8 * h); };
    float shift[2] = {0, 0};  // of the two rows, what is added to a score times `factor`
#pragma unroll
    for (int x = 0; x < held; ++x) all[x] = -0.0f;

    auto stage_of = [&](int i) { return static_cast<int>((visited + i) % stages); };
    auto phase_of = [&](int i) { return static_cast<int>((visited + i) / stages % 2); };
    auto wait_for_keys = [&](int i) { barrier_wait(&sh.k_full[stage_of(i)], phase_of(i)); };
    auto wait_for_values = [&](int i) { barrier_wait(&sh.v_full[stage_of(i)], phase_of(i)); };
    auto keys_taken = [&](int i) {
      if (leads) barrier_arrive(&sh.k_empty[stage_of(i)]);
    };
    auto values_taken = [&](int i) {
      if (leads) barrier_arrive(&sh.v_empty[stage_of(i)]);
    };
    auto score = [&](int i) {  // begins
      uint64_t q = q0, k = k0 + stage_of(i) * k_step;
      if constexpr (!ahead) q = again(q), k = again(k);
      constexpr int q_half = rows * kHalf * 2 >> 4, k_half = kKeys * kHalf * 2 >> 4;
#pragma unroll
      for (int j = 0; j < steps; ++j) {
        uint64_t a = q + j / 4 * q_half + j % 4 * kNext<false>, b = k + j / 4 * k_half + j % 4 * kNext<false>;
        if (j == 0)
          begin<false, false>(s, a, b);
        else
          multiply<false, false>(s, a, b, true);
      }
      products_end();
    };
    auto sum = [&](int i) {  // begins
      bool more = i % kLeaf != 0;
      uint64_t v = v0 + stage_of(i) * v_step;
      if constexpr (!ahead) v = again(v);
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        if constexpr (ones_apart) {
          uint64_t ones = operand<true>(sh.v[0] + kKeys * kDim);
          multiply<false, true>(__nv_bfloat16(), acc, probability[j], v + j * kNext<true>, ones, more || j > 0);
        } else {
          multiply<false, true>(__nv_bfloat16(), acc, probability[j], v + j * kNext<true>, more || j > 0);
        }
      }
      products_end();
    };
    auto powers = [&] {
      uint32_t bits = 0;
#pragma unroll
      for (int x = 0; x < kKeys / 2; x += 2) {
        float a = power_of_2(__fmaf_rn(s[x], factor, shift[x / 2 % 2]));
        float b = power_of_2(__fmaf_rn(s[x + 1], factor, shift[x / 2 % 2]));
        bits |= probability[x / 8][x / 2 % 4] = pack<__nv_bfloat16>(a, b);
      }
      return bits;
    };
    auto exceeds = [&](float score, int h) { return too_great(power_of_2(__fmaf_rn(score, factor, shift[h]))); };
    // A row whose probabilities are too great is measured by its greatest score.
    auto move = [&](int i) {
      float top[2], alpha[2];
      greatest(s, top);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[h] = greatest_of_row(top[h]);
        bool moves = exceeds(top[h], h);
        float to = moves ? __fmaf_rn(-top[h], factor, -kReserve) : shift[h];
        alpha[h] = moves ? power_of_2(to - shift[h]) : 1.0f;
        shift[h] = to;
      }
      if (i % kLeaf) {
#pragma unroll
        for (int x = 0; x < sums + 4; ++x) acc[x] = acc[x] * alpha[x / 2 % 2];
      }
      if constexpr (ahead) powers();
    };
    // The scores of a block become probabilities.
    bool values_there = false, keys_there = false;  // of this block, and of the next one
    auto weigh = [&](int i) {
      if constexpr (stages > 1) {
        values_there = barrier_ended(&sh.v_full[stage_of(i)], phase_of(i));
        keys_there = barrier_ended(&sh.k_full[stage_of(i + 1)], phase_of(i + 1));
      }
      if (i % kLeaf == 0) {  // the leaf's first score, of which the first of four lanes knows
#pragma unroll
        for (int h = 0; h < 2; ++h)
          shift[h] = __fmaf_rn(-__shfl_sync(~0u, s[2 * h], 0, 4), factor, -kReserve);
      }
      if (i >= plain) {
        int first = i * kKeys + static_cast<int>(thread_again() % 4 * 2);
#pragma unroll
        for (int h = 0; h < 2; ++h) hide(s, h, position_of(h) - first);
      }
      if constexpr (ahead) {
        if (__any_sync(~0u, powers() & kTooGreat)) move(i);
      } else {  // with registers for either scores or probabilities the greatest score is looked for
        float top[2];
        greatest(s, top);
        if (__any_sync(~0u, exceeds(top[0], 0) || exceeds(top[1], 1))) move(i);
        powers();
      }
    };
    auto joined = [&](int x) -> float4& { return sh.joined[(x - held) / 4][thread_again() - 128]; };
    // A thread's first vector in memory.
    auto elsewhere_of = [&] {
      return fixed(p.joined + (blockIdx.x * elsewhere * groups * 128 + thread_again() - 128));
    };
    // What `change` makes of those: some are read at a time.
    auto change_elsewhere = [&](bool reads, bool writes, auto change) {
      constexpr int at_a_time = 5;
      static_assert(elsewhere % at_a_time == 0);
#pragma unroll
      for (int i = 0; i < elsewhere; i += at_a_time) {
        float4* mine = elsewhere_of();
        float4 v[at_a_time];
        nothing_ahead();
#pragma unroll
        for (int j = 0; j < at_a_time; ++j)
          v[j] = reads ? load_own(mine + (i + j) * groups * 128) : make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
#pragma unroll
        for (int j = 0; j < at_a_time; ++j) {
          change(near + 4 * (i + j), v[j]);
          if (writes) store_own(mine + (i + j) * groups * 128, v[j]);
        }
      }
    };
    // A leaf joins the leaves before, of which `w` is what `whole` says. What those are measured by seldom changes, and then
    // their sums need not be multiplied.
    float before[2], after[2];  // what multiplies the sums of the leaves before, and the leaf's
    auto whole = [&](int h) -> float2& { return sh.whole[thread_again() / 4 - 32][h]; };
    auto joins = [&](int h, float2 w) {
      float to = meet(w.x, shift[h], before[h], after[h]);
      return make_float2(to, __fmaf_rn(acc[sums + 2 * h], after[h], w.y * before[h]));
    };
    auto end_leaf = [&](bool first) {
      bool moves = false;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float2 was = first ? make_float2(shift[h], -0.0f) : whole(h), now = joins(h, was);
        __syncwarp();
        whole(h) = now;
        moves |= !(now.x == was.x);
      }
      __syncwarp();
      if (__any_sync(~0u, moves)) {
#pragma unroll
        for (int x = 0; x < held; ++x) all[x] *= before[x / 2 % 2];
        if (!first) {
#pragma unroll
          for (int x = held; x < near; x += 4) {
            float4 to = joined(x);
            joined(x) = make_float4(to.x * before[0], to.y * before[0], to.z * before[1], to.w * before[1]);
          }
#pragma unroll 1
          for (int i = 0; i < elsewhere; ++i) {
            float4* mine = elsewhere_of() + i * groups * 128;
            float4 to = load_own(mine);
            store_own(mine, make_float4(to.x * before[0], to.y * before[0], to.z * before[1], to.w * before[1]));
          }
        }
      }
      auto add = [&](int x, float4& to) {
        to.x = __fmaf_rn(acc[x], after[0], to.x);
        to.y = __fmaf_rn(acc[x + 1], after[0], to.y);
        to.z = __fmaf_rn(acc[x + 2], after[1], to.z);
        to.w = __fmaf_rn(acc[x + 3], after[1], to.w);
      };
#pragma unroll
      for (int x = 0; x < held; ++x) all[x] = __fmaf_rn(acc[x], after[x / 2 % 2], all[x]);
#pragma unroll
      for (int x = held; x < near; x += 4) {
        float4 to = first ? make_float4(-0.0f, -0.0f, -0.0f, -0.0f) : joined(x);
        add(x, to);
        joined(x) = to;
      }
      change_elsewhere(!first, true, add);
    };

    if (n) {
      wait_for_keys(0);
      turn_begin();
      products_begin();
      score(0);
      turn_end();
      products_wait<0>();
      products_taken(s);
      keys_taken(0);
      weigh(0);
#pragma unroll 1
      for (int i = 1; i < n; ++i) {
        if (!values_there) wait_for_values(i - 1);
        if (ahead && !keys_there) wait_for_keys(i);
        turn_begin();
        products_begin();
        sum(i - 1);
        if constexpr (ahead) score(i);
        turn_end();
        products_wait<ahead ? 1 : 0>();
        products_taken(acc);
        values_taken(i - 1);
        if (i % kLeaf == 0) end_leaf(i == kLeaf);
        if constexpr (!ahead) {
          wait_for_keys(i);
          products_begin();
          score(i);
        }
        products_wait<0>();
        products_taken(s);
        keys_taken(i);
        weigh(i);
      }
      queries_taken();
      if (!values_there) wait_for_values(n - 1);
      turn_begin();
      products_begin();
      sum(n - 1);
      turn_end();
      products_wait<0>();
      products_taken(acc);
      values_taken(n - 1);
    } else {
      __syncwarp();
      queries_taken();
      turn_begin();
      turn_end();
    }
    int most = blocks_of_any<groups>(p, t);
#pragma unroll 1
    for (int i = n; i < most; ++i) {  // other groups' blocks
      wait_for_keys(i);
      keys_taken(i);
      turn_begin();
      turn_end();
      wait_for_values(i);
      values_taken(i);
    }
    visited += most;
    if (n == 0) continue;

    int last_begin = (n - 1) / kLeaf * kLeaf * kKeys;  // of the last leaf
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int position = position_of(h);
      bool seen = position >= last_begin;
      float2 w = make_float2(shift[h], acc[sums + 2 * h]);
      if (last_begin) {
        w = whole(h);
        if (seen) w = joins(h, w);
#pragma unroll
        for (int x = 2 * h; x < near; x += 4) {
          float2 old;
          if (x < held)
            old = make_float2(all[x < held ? x : 0], all[x < held ? x + 1 : 0]);
          else
            old = reinterpret_cast<const float2*>(&joined(x / 4 * 4))[h];
          acc[x] = seen ? __fmaf_rn(acc[x], after[h], old.x * before[h]) : old.x;
          acc[x + 1] = seen ? __fmaf_rn(acc[x + 1], after[h], old.y * before[h]) : old.y;
        }
        change_elsewhere(true, false, [&](int x, float4& old) {
          float a = h ? old.z : old.x, b = h ? old.w : old.y;
          acc[x + 2 * h] = seen ? __fmaf_rn(acc[x + 2 * h], after[h], a * before[h]) : a;
          acc[x + 2 * h + 1] = seen ? __fmaf_rn(acc[x + 2 * h + 1], after[h], b * before[h]) : b;
        });
      }
      divide<sums>(acc, h, w.y);
      int r = first_row() + 8 * h, place = position - t.context;  // among the queries
      bool here = place < t.q_len && r < p.positions * p.together;
      int64_t head = t.head + r - p.position_of(r) * p.together;
      int64_t at = ((t.q0 + place) * int64_t{p.heads} + head) * kDim;
      store_row<sums>(acc, h, static_cast<__nv_bfloat16*>(p.out) + at, here);
      if (p.shift && here && thread_again() % 4 == 0)
        p.shift[(head * p.pads + t.q0 / kStatistics + t.s) * kStatistics + place] = w.x - log2f(w.y);
    }
  }
  if (group == 0) turn_begin();  // which the last group's last one ended for
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
    barrier_init(&sh.q_empty, warps + 2);
    barrier_init(&sh.on_its_way, 1);
    for (int i = 0; i < Shared<kDim>::stages; ++i) {
      barrier_init(&sh.k_full[i], 1);
      barrier_init(&sh.k_empty[i], warps);
      barrier_init(&sh.v_full[i], 1);
      barrier_init(&sh.v_empty[i], warps);
    }
    barrier_init_done();
  }
  for (int x = threadIdx.x; x < Shared<kDim>::ones / 8; x += blockDim.x)
    for (int i = 0; i < Shared<kDim>::stages; ++i)
      reinterpret_cast<uint4*>(sh.v[i] + kKeys * kDim)[x] = make_uint4(0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80);
  shared_written();
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
      bring_rows<kDim, false>(sh, &k, p);
    else if (threadIdx.x < 96)
      bring_rows<kDim, true>(sh, &v, p);
  } else {
    registers_up<Plan<kDim>::many>();
    attend<kDim>(sh, p);
  }
}

// Host.

template <int kDim>
cudaError_t launch(const AlignkitAttention& given, void* memory, int64_t memory_bytes, cudaStream_t stream) {
  constexpr int rows = Shared<kDim>::rows, bytes = sizeof(Shared<kDim>);
  constexpr int elsewhere = Plan<kDim>::elsewhere * Shared<kDim>::groups * 128 * static_cast<int>(sizeof(float4));
  Problem p = {given, part_rows_of(given.page, kKeys), rows / given.together, (1 << 16) / given.together + 1,
               given.heads / given.kv_heads, static_cast<float4*>(memory)};
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
  if constexpr (elsewhere > 0) processors = static_cast<int>(std::min<int64_t>(processors, memory_bytes / elsewhere));
  if (processors == 0) return cudaErrorInvalidValue;
  int64_t tiles = (int64_t{p.tokens} / p.positions + p.sequences) * (p.heads / p.together);
  unsigned blocks = static_cast<unsigned>(std::max<int64_t>(std::min<int64_t>(tiles, processors), 1));
  return launch_early(attention_forward<kDim>, blocks, Shared<kDim>::threads, bytes, stream, q, k, v, p);
}

}  // namespace
}  // namespace alignkit

// `memory`, of `bytes`: of heads of 256, for sums over leaves, 102400 for each block of threads, of which there are no more
// than that suffices for, nor than multiprocessors. Returns a cudaError_t.
extern "C" int alignkit_attention_forward(const AlignkitAttention* p, void* memory, int64_t bytes, cudaStream_t stream) {
  if (p->page % 16 || p->tokens < 0 || p->tokens * int64_t{p->heads} >= 1 << 30 || p->heads % p->kv_heads ||
      (p->together != 1 && p->together * p->kv_heads != p->heads) || p->together > 64)
    return cudaErrorInvalidValue;
  using alignkit::launch;
  if (p->dim == 256) return launch<256>(*p, memory, bytes, stream);
  if (p->dim == 128) return launch<128>(*p, memory, bytes, stream);
  if (p->dim == 96) return launch<96>(*p, memory, bytes, stream);
  if (p->dim == 64) return launch<64>(*p, memory, bytes, stream);
  return cudaErrorInvalidValue;
}
