// Causal attention, forward: packed training sequences, and sequences of a paged KV cache with many queries (prefill).
//
// Tile: 64 rows for each of two or three consumer warpgroups. A row is one query of one head. A tile holds the queries
// of one head, or the same queries of all heads of a GQA group (`together`).
//
// Warp specialization: three producer warps issue TMA loads, one for queries, one for keys, one for values, in blocks
// of 128 keys. The query warp also schedules the tiles. The consumer warpgroups alternate on the tensor core
// (FlashAttention-3's ping-pong): a warpgroup issues P V of a block and Q K^T of the next block, then computes its
// softmax while the other warpgroups' GEMMs run. Softmax costs one multiply-add, one exp2 and half a conversion per
// score. It skips the running maximum in most blocks, and the row sum comes from a column of ones beside V. At head
// dimension 256, scores and accumulators do not fit in registers together, so Q K^T starts after P V is done.
//
// Order of summation (docs/contract.md, "On Hopper GPUs"): a leaf is 512 keys from position 0, visited in ascending
// blocks of 128. Q K^T is a chain over the head dimension, P V a chain over the leaf's keys. Leaves are merged in
// ascending order in fp32.
//
// Launch (it changes no bits, like the rows of a tile): one persistent CTA per SM, (warpgroups + 1) * 128 threads. The
// CTAs take the tiles in snake order, most keys first. Sequence lengths are read on the device, so a CUDA graph can be
// replayed with other lengths.
#include <algorithm>

#include "../../interface.h"
#include "../ptx/exponential.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/pack.cuh"
#include "../ptx/pdl.cuh"
#include "../ptx/thread.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "heads.cuh"

// Arguments, filled by alignkit/ops/attention/cuda_backend.py.
struct AlignkitAttention {
  AlignkitHeads q, k, v;
  void* out;                           // [tokens, heads, dim]
  float* shift;                        // statistics for the backward pass, [heads, pads * 128]; null: not saved
  AlignkitInts starts, kv_len, table;  // kv_len and table: paged sequences only
  int64_t table_row, kv_rows;          // row stride of the block table; rows of k
  int page, width;                     // rows per page, 0: k is packed like q; pages per row of the block table
  // Skipped (the decode kernel computes them): paged sequences of at most `most` queries, and paged sequences of at
  // most `few` queries after at least `far` cached positions.
  int most, few, far;
  int tokens, sequences, heads, kv_heads, dim, pads;
  int together;  // heads per tile: 1, or the size of the GQA group
  float factor;  // scale of scores times log2(e)
};

ALIGNKIT_STRUCT(AlignkitAttention, q, k, v, out, shift, starts, kv_len, table, table_row, kv_rows, page, width, most,
                few, far, tokens, sequences, heads, kv_heads, dim, pads, together, factor)

namespace alignkit {
namespace {

struct Problem : AlignkitAttention {
  int box_rows;     // rows of a K/V TMA box, all in one page
  int positions;    // per tile
  int reciprocal;   // floor(2^16 / together) + 1
  int gqa_group;    // query heads per KV head
  float4* scratch;  // merged accumulators in global memory, see Plan

  // Return row / together, exact for the rows of a tile.
  __device__ int position_of(int row) const { return row * reciprocal >> 16; }
};

constexpr int kKeys = 128;          // contract: keys per block (SM90.kv_block)
constexpr int kLeaf = 512 / kKeys;  // contract: blocks per leaf (SM90.kv_leaf)
// A probability is exp2(score * factor + shift). It is 2^-31 at the reference score, which is the leaf's first score.
// If a rounded probability of a block reaches 2, the row's maximum in that block becomes the reference.
constexpr float kReserve = 31;              // contract: exponent offset of probabilities (SM90.reserve)
constexpr uint32_t kAtLeast2 = 0x40004000;  // contract: the top exponent bit of two packed bf16, set from 2 on
constexpr float kInfinity = __builtin_huge_valf();

// Return whether the probability, rounded to bf16, is at least 2 (or NaN).
__device__ __forceinline__ bool at_least_2(float probability) {
  return (pack<__nv_bfloat16>(probability, 0.0f) & kAtLeast2) != 0;
}

// Return the shift that the merged leaves and the next leaf have in common, given the shift of each; set the factor of
// each one's accumulators.
__device__ __forceinline__ float merge_softmax_state(float merged, float leaf, float& merged_scale, float& leaf_scale) {
  float shift = merged - leaf <= kReserve ? merged : leaf;
  merged_scale = exp2_approx(shift - merged);
  leaf_scale = exp2_approx(shift - leaf);
  return shift;
}

// schedule: tuning by head dimension.
// - groups: consumer warpgroups; stages: K/V pipeline depth; *_registers: per thread, for setmaxnreg.
// - merged_registers: accumulators merged over finished leaves that a thread keeps in registers; merged_global: float4
//   vectors of these in global memory. The rest is in shared memory.
// - intra_overlap: Q K^T of a block is issued before P V of the previous block is done (FlashAttention-3's
//   intra-warpgroup overlap). It needs registers for both.
template <int kDim>
struct Plan;

template <>
struct Plan<256> {
  static constexpr int groups = 2, stages = 1, producer_registers = 40, consumer_registers = 232;
  static constexpr int merged_registers = 0, merged_global = 25;
  static constexpr bool intra_overlap = false;
};

template <>
struct Plan<128> {
  static constexpr int groups = 2, stages = 2, producer_registers = 40, consumer_registers = 232;
  static constexpr int merged_registers = 56, merged_global = 0;
  static constexpr bool intra_overlap = true;
};

template <>
struct Plan<96> {
  static constexpr int groups = 2, stages = 2, producer_registers = 40, consumer_registers = 232;
  static constexpr int merged_registers = 48, merged_global = 0;
  static constexpr bool intra_overlap = true;
};

template <>
struct Plan<64> {
  static constexpr int groups = 3, stages = 3, producer_registers = 32, consumer_registers = 160;
  static constexpr int merged_registers = 0, merged_global = 0;
  static constexpr bool intra_overlap = true;
};

struct Tile {
  int s;  // sequence; -1: no tile left
  int q0, q_len, context;
  int first;  // index of the tile's first query in the sequence
  int head;
};

template <int kDim>
struct Shared {
  using Plan = alignkit::Plan<kDim>;
  static constexpr int groups = Plan::groups, stages = Plan::stages, rows = groups * 64, threads = (groups + 1) * 128;
  static_assert(kRegistersFit<Plan::producer_registers, Plan::consumer_registers, groups>);
  static constexpr int boxes = kBoxesPerHead<kDim>, width = boxes * kBoxColumns;
  // The ones that sum the probabilities: a swizzled column box of their own after V, or the unused columns of V's last
  // box. At dim 256 the wgmma has no columns left, so a second wgmma of 8 columns takes them.
  static constexpr bool ones_within = kDim % kBoxColumns != 0, ones_separate = kDim == 256;
  static constexpr int ones = (ones_within ? 0 : ones_separate ? 16 : kKeys) * kBoxColumns;  // elements
  static constexpr int acc_count = kDim / 2;  // output accumulators of a thread
  // float4 vectors of a thread's merged accumulators in shared memory.
  static constexpr int merged_shared = (acc_count - Plan::merged_registers) / 4 - Plan::merged_global;
  __nv_bfloat16 q[rows * width];
  __nv_bfloat16 k[stages][kKeys * width];
  __nv_bfloat16 v[stages][kKeys * width + ones];
  // Accumulators merged over finished leaves, by vector and thread.
  float4 merged[merged_shared > 0 ? merged_shared : 1][groups * 128];
  // Softmax state of finished leaves, for each of the two rows that four lanes share: shift, and sum of probabilities.
  alignas(16) float2 row_state[groups * 32][2];
  Tile tile[2];  // double-buffered: the scheduler writes one while consumers read the other
  uint64_t tile_ready, q_full, q_empty, k_full[stages], k_empty[stages], v_full[stages], v_empty[stages];
  uint64_t patch_full;  // full barrier of a V stage that the producer patches first: rows to zero, or ones to write
};

// Return the number of key blocks that a warpgroup's queries attend to; 0: it has no queries.
__device__ __forceinline__ int group_blocks(const Problem& p, const Tile& t, int group) {
  int begin = t.first + p.position_of(group * 64);
  int last = min(t.q_len - 1, t.first + min(p.position_of(group * 64 + 63), p.positions - 1));
  return begin < t.q_len ? (t.context + last) / kKeys + 1 : 0;
}

// Return the number of key blocks that any warpgroup of the tile attends to.
template <int kGroups>
__device__ __forceinline__ int tile_blocks(const Problem& p, const Tile& t) {
  int count = 0;
#pragma unroll 1
  for (int group = 0; group < kGroups; ++group) count = max(count, group_blocks(p, t, group));
  return count;
}

// The tile scheduler of a CTA, run by one warp.
// Tile j of a sequence has the length class (`level`) context / positions + j, which grows with its number of keys.
// Tiles are numbered class by class, the longest class first. The CTA takes one tile per wave of gridDim.x tiles, in
// snake order.
struct TileScheduler {
  const Problem& p;
  int head_tiles, level = -1, base = 0, wave = 0, tiles_before = 0;
  int q0, q_len, context, low, high;  // lane's sequence; its levels are [low, high)

  __device__ TileScheduler(const Problem& p) : p(p), head_tiles(p.heads / p.together) {
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

  __device__ int lane() const { return static_cast<int>(read_tid_x() % 32); }  // recomputed: registers are scarce

  // Load sequence base + lane.
  __device__ void read() {
    int s = base + lane();
    low = high = 0;
    if (s >= p.sequences) return;
    sequence_rows(p.starts, s, p.tokens, q0, q_len);
    context = 0;
    if (p.page) {
      int64_t length = load_int(p.kv_len, s);
      if (length < q_len || length > int64_t{p.width} * p.page) return;
      if (q_len <= p.most || (q_len <= p.few && length - q_len >= p.far)) return;
      context = static_cast<int>(length) - q_len;
    }
    low = context / p.positions;
    high = low + (q_len + p.positions - 1) / p.positions;
  }

  __device__ Tile next() {
    int target = wave * gridDim.x + (wave % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    ++wave;
#pragma unroll 1
    while (level >= 0) {
      bool active = low <= level && level < high;
      unsigned active_lanes = __ballot_sync(~0u, active);
      int tiles_through = tiles_before + __popc(active_lanes) * head_tiles;
      if (target < tiles_through) {
        int i = target - tiles_before, nth = i / head_tiles;
        int source = __ffs(__ballot_sync(~0u, active && __popc(active_lanes & ((1u << lane()) - 1)) == nth)) - 1;
        Tile t;
        t.s = base + source;
        t.q0 = __shfl_sync(~0u, q0, source);
        t.q_len = __shfl_sync(~0u, q_len, source);
        t.context = __shfl_sync(~0u, context, source);
        t.first = (level - __shfl_sync(~0u, low, source)) * p.positions;
        t.head = i % head_tiles * p.together;
        return t;
      }
      tiles_before = tiles_through;
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

// Tile scheduler and query producer warp; it runs one tile ahead of the consumers.
template <int kDim>
__device__ __forceinline__ void load_queries(Shared<kDim>& sh, const CUtensorMap* q, const Problem& p) {
  constexpr int rows = Shared<kDim>::rows;
  TileScheduler scheduler(p);
  for (int slot = 0;; slot ^= 1) {
    Tile t = scheduler.next();
    mbarrier_wait(&sh.q_empty, slot ^ 1);
    if (threadIdx.x % 32 == 0) {
      sh.tile[slot] = t;
      mbarrier_arrive(&sh.tile_ready);
      if (t.s < 0) {
        mbarrier_arrive(&sh.q_full);
      } else {
        mbarrier_expect_tx(&sh.q_full, p.positions * p.together * Shared<kDim>::width * 2);
#pragma unroll
        for (int h = 0; h < Shared<kDim>::boxes; ++h)
          tma_load(sh.q + h * rows * kBoxColumns, q, h * kBoxColumns, t.head, t.q0 + t.first, 0, &sh.q_full);
      }
    }
    __syncwarp();
    if (t.s < 0) return;
  }
}

// Zero the rows of a V block from `left` on, by one warp. Rows past the sequence's end may hold inf or NaN, which a
// probability of 0 does not cancel.
template <int kDim>
__device__ __forceinline__ void zero_rows(__nv_bfloat16* v, int left, int lane) {
#pragma unroll 1
  for (int x = left * kBoxColumns + lane * 8; x < kKeys * kBoxColumns; x += 32 * 8)
#pragma unroll
    for (int h = 0; h < kBoxesPerHead<kDim>; ++h)
      *reinterpret_cast<uint4*>(v + h * kKeys * kBoxColumns + x) = make_uint4(0, 0, 0, 0);
}

// Write eight columns of ones after the values of a block, by one warp: 16 bytes of each swizzled row of the last box.
template <int kDim>
__device__ __forceinline__ void fill_ones(__nv_bfloat16* v, int lane) {
  constexpr int vector = kDim % kBoxColumns / 8;
#pragma unroll 1
  for (int row = lane; row < kKeys; row += 32)
    *reinterpret_cast<uint4*>(v + kDim / kBoxColumns * kKeys * kBoxColumns + row * kBoxColumns +
                              (vector ^ row % 8) * 8) = make_uint4(0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80);
}

// K or V producer warp. Each lane loads one TMA box of a block: some rows of one page by 64 columns.
// Values are recomputed where they are needed, because the producer has few registers.
template <int kDim, bool kValues>
__device__ __forceinline__ void load_kv(Shared<kDim>& sh, const CUtensorMap* map, const Problem& p) {
  constexpr int stages = Shared<kDim>::stages, boxes = Shared<kDim>::boxes, row_bytes = Shared<kDim>::width * 2;
  constexpr bool ones_within = kValues && Shared<kDim>::ones_within;
  int box_rows = p.box_rows, row_boxes = kKeys / box_rows, first = threadIdx.x % 32 % row_boxes * box_rows;
  auto& full_barriers = kValues ? sh.v_full : sh.k_full;
  auto& empty_barriers = kValues ? sh.v_empty : sh.k_empty;
  uint32_t issued = 0;  // blocks, over all tiles
  int phases = 0;       // bit 0: phase of the tile barriers; bit 1: phase of patch_full; packed to save a register
  auto leader = [] { return read_tid_x() % 32 == 0; };
  auto column_box = [&] { return static_cast<int>(read_tid_x() % 32) / row_boxes; };
  for (;; phases ^= 1) {
    mbarrier_wait(&sh.tile_ready, phases % 2);
    const Tile& t = sh.tile[phases % 2];
    if (t.s < 0) return;
    int n = tile_blocks<Shared<kDim>::groups>(p, t), head = t.head / p.gqa_group;
    auto end = [&] { return t.context + t.q_len; };  // reread: registers are scarce
    __syncwarp();
    if (leader()) mbarrier_arrive(&sh.q_empty);  // tile read: the scheduler may publish the next one
    auto row_of = [&](int position) {
      if (!p.page) return t.q0 + position;
      if (position >= end()) return 0;
      int64_t page = load_int(p.table, t.s * p.table_row + position / p.page);
      page = min(max(page, int64_t{0}), p.kv_rows / p.page - 1);
      return static_cast<int>(page) * p.page + position % p.page;
    };
    int row = row_of(first);
#pragma unroll 1
    for (int i = 0; i < n; ++i, ++issued) {
      uint32_t stage = issued % stages, phase = issued / stages % 2;
      int left = end() - i * kKeys, bytes = min(row_boxes, (left + box_rows - 1) / box_rows) * box_rows * row_bytes;
      bool valid = column_box() < boxes && first < left;
      bool zeroes = kValues && left < kKeys, patches = zeroes || ones_within;
      int next_row = i + 1 < n ? row_of((i + 1) * kKeys + first) : 0;  // prefetched block-table lookup
      mbarrier_wait(empty_barriers + stage, phase ^ 1);
      uint64_t* full = patches ? &sh.patch_full : full_barriers + stage;
      if (leader()) mbarrier_expect_tx(full, bytes);
      __syncwarp();
      __nv_bfloat16* dst = (kValues ? sh.v[stage] : sh.k[stage]) + (column_box() * kKeys + first) * kBoxColumns;
      if (valid) tma_load(dst, map, column_box() * kBoxColumns, head, row, 0, full);
      if (patches) {
        mbarrier_wait(full, phases / 2);
        phases ^= 2;
        if (zeroes) zero_rows<kDim>(sh.v[stage], left, read_tid_x() % 32);
        if (ones_within) {
          __syncwarp();
          fill_ones<kDim>(sh.v[stage], read_tid_x() % 32);
        }
        fence_proxy_async();
        __syncwarp();
        if (leader()) mbarrier_arrive(full_barriers + stage);
      }
      row = next_row;
    }
  }
}

// Set `top` to the thread's maxima of its two rows; the four lanes of a quad share a row.
__device__ __forceinline__ void row_max(const float (&s)[kKeys / 2], float (&top)[2]) {
  float part[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
  for (int j = 1; j < kKeys / 8; ++j)
#pragma unroll
    for (int x = 0; x < 4; ++x) part[x] = fmaxf(part[x], s[4 * j + x]);
#pragma unroll
  for (int h = 0; h < 2; ++h) top[h] = fmaxf(part[2 * h], part[2 * h + 1]);
}

// Return the maximum over the four lanes of a row.
__device__ __forceinline__ float quad_max(float top) {
#pragma unroll
  for (int distance = 2; distance; distance /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
  return top;
}

// Causal mask: set scores of keys after the row's position to -inf; `limit` is the position relative to the thread's
// first key.
__device__ __forceinline__ void mask_causal(float (&s)[kKeys / 2], int h, int limit) {
#pragma unroll
  for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (8 * j + e > limit) s[4 * j + 2 * h + e] = -kInfinity;
}

// Divide a thread's row h by `by`, correctly rounded.
// Far from overflow and underflow the division uses one reciprocal for the row, with the same bits as __fdiv_rn.
template <int kCount, int kSize>
__device__ __forceinline__ void divide(float (&x)[kSize], int h, float by) {
  float smallest = kInfinity, largest = 0;
#pragma unroll
  for (int i = 0; i < kCount; i += 4)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      smallest = fminf(smallest, fabsf(x[i + 2 * h + e]));
      largest = fmaxf(largest, fabsf(x[i + 2 * h + e]));
    }
  if (by >= 0x1p-31f && by < 0x1p44f && smallest > 0x1p-80f && largest < 0x1p64f) {
    constexpr float scale_up = 0x1p32f;  // applied to numerator and denominator
    by *= scale_up;
    float r = __frcp_rn(by);
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& a = x[i + 2 * h + e];
        float b = a * scale_up, q = b * r;
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

// Consumer warpgroup: computes 64 rows of each tile.
template <int kDim>
__device__ __forceinline__ void attend(Shared<kDim>& sh, const Problem& p) {
  constexpr int stages = Shared<kDim>::stages, rows = Shared<kDim>::rows, steps = kDim / 16;
  constexpr int acc_count = Shared<kDim>::acc_count, groups = Shared<kDim>::groups;
  constexpr int merged_registers = Shared<kDim>::Plan::merged_registers;
  constexpr bool ones_separate = Shared<kDim>::ones_separate, intra_overlap = Shared<kDim>::Plan::intra_overlap;
  constexpr int merged_global = Shared<kDim>::Plan::merged_global;
  constexpr int on_chip = acc_count - 4 * merged_global;  // merged accumulators in registers and shared memory
  constexpr int k_step = sizeof(sh.k[0]) >> 4, v_step = sizeof(sh.v[0]) >> 4;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  bool leader = threadIdx.x % 32 == 0;
  // The first of the thread's two tile rows; the second is 8 further.
  auto first_row = [&] {
    uint32_t thread = read_tid_x();
    return static_cast<int>(group * 64 + thread % 128 / 32 * 16 + thread % 32 / 4);
  };
  uint64_t q0 = smem_descriptor<false>(sh.q + group * 64 * kBoxColumns), k0 = smem_descriptor<false>(sh.k[0]),
           v0 = smem_descriptor<true>(sh.v[0], kKeys);
  float factor = p.factor;
  uint32_t first_block = 0;  // pipeline index of the tile's first block
  int q_phase = 0;
  float s[kKeys / 2];                  // scores of a block, Q K^T
  float acc[acc_count + 4];            // current leaf; the last four: sums of probabilities of the two rows, each twice
  float merged[merged_registers + 1];  // finished leaves
  uint32_t probability[kKeys / 16][4];
#pragma unroll
  for (int x = 0; x < acc_count + 4; ++x) acc[x] = 0;
  // Ping-pong: a warpgroup issues GEMMs after the previous warpgroup has issued its own.
  auto pingpong_wait = [&] { named_barrier_sync(1 + group, 256); };
  auto pingpong_signal = [&] { named_barrier_arrive(group + 1 < groups ? 2 + group : 1, 256); };
  if (group == groups - 1) pingpong_signal();
  for (;;) {
    mbarrier_wait(&sh.q_full, q_phase);
    const Tile& t = sh.tile[q_phase];  // reread where needed: registers are scarce
    q_phase ^= 1;
    if (t.s < 0) break;
    auto release_queries = [&] {
      if (leader) mbarrier_arrive(&sh.q_empty);
    };
    int n = group_blocks(p, t, group);
    // Blocks that every row attends to in full.
    int unmasked = (t.context + t.first + p.position_of(group * 64) + 1) / kKeys;
    auto position_of = [&](int h) { return t.context + t.first + p.position_of(first_row() + 8 * h); };
    float shift[2] = {0, 0};  // added to score * factor, for each of the two rows
#pragma unroll
    for (int x = 0; x < merged_registers; ++x) merged[x] = -0.0f;

    auto stage_of = [&](int i) { return static_cast<int>((first_block + i) % stages); };
    auto phase_of = [&](int i) { return static_cast<int>((first_block + i) / stages % 2); };
    auto wait_for_keys = [&](int i) { mbarrier_wait(&sh.k_full[stage_of(i)], phase_of(i)); };
    auto wait_for_values = [&](int i) { mbarrier_wait(&sh.v_full[stage_of(i)], phase_of(i)); };
    auto release_keys = [&](int i) {
      if (leader) mbarrier_arrive(&sh.k_empty[stage_of(i)]);
    };
    auto release_values = [&](int i) {
      if (leader) mbarrier_arrive(&sh.v_empty[stage_of(i)]);
    };
    auto start_qk = [&](int i) {  // issues S = Q K^T
      uint64_t q = q0, k = k0 + stage_of(i) * k_step;
      if constexpr (!intra_overlap) q = opaque(q), k = opaque(k);
      constexpr int q_box = rows * kBoxColumns * 2 >> 4, k_box = kKeys * kBoxColumns * 2 >> 4;
#pragma unroll
      for (int j = 0; j < steps; ++j) {
        uint64_t a = q + j / 4 * q_box + j % 4 * kDescriptorStep<false>,
                 b = k + j / 4 * k_box + j % 4 * kDescriptorStep<false>;
        if (j == 0)
          wgmma_zero<false, false>(s, a, b);
        else
          wgmma<false, false>(s, a, b, true);
      }
      warpgroup_commit();
    };
    auto start_pv = [&](int i) {  // issues O += P V, and the row sums
      bool accumulate = i % kLeaf != 0;
      uint64_t v = v0 + stage_of(i) * v_step;
      if constexpr (!intra_overlap) v = opaque(v);
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        if constexpr (ones_separate) {
          uint64_t ones = smem_descriptor<true>(sh.v[0] + kKeys * kDim);
          wgmma<false, true>(__nv_bfloat16(), acc, probability[j], v + j * kDescriptorStep<true>, ones,
                             accumulate || j > 0);
        } else {
          wgmma<false, true>(__nv_bfloat16(), acc, probability[j], v + j * kDescriptorStep<true>, accumulate || j > 0);
        }
      }
      warpgroup_commit();
    };
    auto compute_probabilities = [&] {
      uint32_t bits = 0;
#pragma unroll
      for (int x = 0; x < kKeys / 2; x += 2) {
        float a = exp2_approx(__fmaf_rn(s[x], factor, shift[x / 2 % 2]));
        float b = exp2_approx(__fmaf_rn(s[x + 1], factor, shift[x / 2 % 2]));
        bits |= probability[x / 8][x / 2 % 4] = pack<__nv_bfloat16>(a, b);
      }
      return bits;
    };
    auto overflows = [&](float score, int h) { return at_least_2(exp2_approx(__fmaf_rn(score, factor, shift[h]))); };
    // Make the row's maximum the reference score where a probability reaches 2; rescale the leaf's accumulators.
    auto rescale = [&](int i) {
      float top[2], alpha[2];
      row_max(s, top);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[h] = quad_max(top[h]);
        bool rescales = overflows(top[h], h);
        float new_shift = rescales ? __fmaf_rn(-top[h], factor, -kReserve) : shift[h];
        alpha[h] = rescales ? exp2_approx(new_shift - shift[h]) : 1.0f;
        shift[h] = new_shift;
      }
      if (i % kLeaf) {
#pragma unroll
        for (int x = 0; x < acc_count + 4; ++x) acc[x] = acc[x] * alpha[x / 2 % 2];
      }
      if constexpr (intra_overlap) compute_probabilities();
    };
    bool values_ready = false, keys_ready = false;  // this block's values; the next block's keys
    // Turn the scores of a block into probabilities.
    auto softmax_block = [&](int i) {
      if constexpr (stages > 1) {
        values_ready = mbarrier_test_wait(&sh.v_full[stage_of(i)], phase_of(i));
        keys_ready = mbarrier_test_wait(&sh.k_full[stage_of(i + 1)], phase_of(i + 1));
      }
      if (i % kLeaf == 0) {  // new leaf: its first score is the reference; lane 0 of the quad holds it
#pragma unroll
        for (int h = 0; h < 2; ++h) shift[h] = __fmaf_rn(-__shfl_sync(~0u, s[2 * h], 0, 4), factor, -kReserve);
      }
      if (i >= unmasked) {
        int first = i * kKeys + static_cast<int>(read_tid_x() % 4 * 2);
#pragma unroll
        for (int h = 0; h < 2; ++h) mask_causal(s, h, position_of(h) - first);
      }
      if constexpr (intra_overlap) {
        if (__any_sync(~0u, compute_probabilities() & kAtLeast2)) rescale(i);
      } else {  // no registers for scores and probabilities together: check the row maximum first
        float top[2];
        row_max(s, top);
        if (__any_sync(~0u, overflows(top[0], 0) || overflows(top[1], 1))) rescale(i);
        compute_probabilities();
      }
    };
    auto shared_vector = [&](int x) -> float4& { return sh.merged[(x - merged_registers) / 4][read_tid_x() - 128]; };
    // The thread's first vector in global memory.
    auto global_vectors = [&] {
      return opaque(p.scratch + (blockIdx.x * merged_global * groups * 128 + read_tid_x() - 128));
    };
    // Apply `change` to the vectors in global memory, a batch at a time.
    auto update_global = [&](bool reads, bool writes, auto change) {
      constexpr int batch = 5;
      static_assert(merged_global % batch == 0);
#pragma unroll
      for (int i = 0; i < merged_global; i += batch) {
        float4* vectors = global_vectors();
        float4 v[batch];
        compiler_fence();
#pragma unroll
        for (int j = 0; j < batch; ++j)
          v[j] = reads ? load_cg(vectors + (i + j) * groups * 128) : make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
#pragma unroll
        for (int j = 0; j < batch; ++j) {
          change(on_chip + 4 * (i + j), v[j]);
          if (writes) store_cg(vectors + (i + j) * groups * 128, v[j]);
        }
      }
    };
    // Merging a finished leaf into the leaves before it. The reference score seldom changes; if it does not, the merged
    // accumulators need no multiplication.
    float merged_scale[2], leaf_scale[2];  // factors of the merged and of the leaf's accumulators
    auto row_state = [&](int h) -> float2& { return sh.row_state[read_tid_x() / 4 - 32][h]; };
    auto merge_row = [&](int h, float2 state) {
      float new_shift = merge_softmax_state(state.x, shift[h], merged_scale[h], leaf_scale[h]);
      return make_float2(new_shift, __fmaf_rn(acc[acc_count + 2 * h], leaf_scale[h], state.y * merged_scale[h]));
    };
    auto merge_leaf = [&](bool first) {
      bool rescales = false;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float2 old_state = first ? make_float2(shift[h], -0.0f) : row_state(h), new_state = merge_row(h, old_state);
        __syncwarp();
        row_state(h) = new_state;
        rescales |= !(new_state.x == old_state.x);
      }
      __syncwarp();
      if (__any_sync(~0u, rescales)) {
#pragma unroll
        for (int x = 0; x < merged_registers; ++x) merged[x] *= merged_scale[x / 2 % 2];
        if (!first) {
#pragma unroll
          for (int x = merged_registers; x < on_chip; x += 4) {
            float4 sums = shared_vector(x);
            shared_vector(x) = make_float4(sums.x * merged_scale[0], sums.y * merged_scale[0], sums.z * merged_scale[1],
                                           sums.w * merged_scale[1]);
          }
#pragma unroll 1
          for (int i = 0; i < merged_global; ++i) {
            float4* vectors = global_vectors() + i * groups * 128;
            float4 sums = load_cg(vectors);
            store_cg(vectors, make_float4(sums.x * merged_scale[0], sums.y * merged_scale[0], sums.z * merged_scale[1],
                                          sums.w * merged_scale[1]));
          }
        }
      }
      auto add = [&](int x, float4& sums) {
        sums.x = __fmaf_rn(acc[x], leaf_scale[0], sums.x);
        sums.y = __fmaf_rn(acc[x + 1], leaf_scale[0], sums.y);
        sums.z = __fmaf_rn(acc[x + 2], leaf_scale[1], sums.z);
        sums.w = __fmaf_rn(acc[x + 3], leaf_scale[1], sums.w);
      };
#pragma unroll
      for (int x = 0; x < merged_registers; ++x) merged[x] = __fmaf_rn(acc[x], leaf_scale[x / 2 % 2], merged[x]);
#pragma unroll
      for (int x = merged_registers; x < on_chip; x += 4) {
        float4 sums = first ? make_float4(-0.0f, -0.0f, -0.0f, -0.0f) : shared_vector(x);
        add(x, sums);
        shared_vector(x) = sums;
      }
      update_global(!first, true, add);
    };

    if (n) {
      wait_for_keys(0);
      pingpong_wait();
      warpgroup_arrive();
      start_qk(0);
      pingpong_signal();
      warpgroup_wait<0>();
      warpgroup_fence_operand(s);
      release_keys(0);
      softmax_block(0);
#pragma unroll 1
      for (int i = 1; i < n; ++i) {
        if (!values_ready) wait_for_values(i - 1);
        if (intra_overlap && !keys_ready) wait_for_keys(i);
        pingpong_wait();
        warpgroup_arrive();
        start_pv(i - 1);
        if constexpr (intra_overlap) start_qk(i);
        pingpong_signal();
        warpgroup_wait<intra_overlap ? 1 : 0>();
        warpgroup_fence_operand(acc);
        release_values(i - 1);
        if (i % kLeaf == 0) merge_leaf(i == kLeaf);
        if constexpr (!intra_overlap) {
          wait_for_keys(i);
          warpgroup_arrive();
          start_qk(i);
        }
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
        release_keys(i);
        softmax_block(i);
      }
      release_queries();
      if (!values_ready) wait_for_values(n - 1);
      pingpong_wait();
      warpgroup_arrive();
      start_pv(n - 1);
      pingpong_signal();
      warpgroup_wait<0>();
      warpgroup_fence_operand(acc);
      release_values(n - 1);
    } else {
      __syncwarp();
      release_queries();
      pingpong_wait();
      pingpong_signal();
    }
    int all_blocks = tile_blocks<groups>(p, t);
#pragma unroll 1
    for (int i = n; i < all_blocks; ++i) {  // blocks that other warpgroups attend to: release them unused
      wait_for_keys(i);
      release_keys(i);
      pingpong_wait();
      pingpong_signal();
      wait_for_values(i);
      release_values(i);
    }
    first_block += all_blocks;
    if (n == 0) continue;

    int last_leaf_begin = (n - 1) / kLeaf * kLeaf * kKeys;  // first key of the last leaf
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int position = position_of(h);
      bool sees_last = position >= last_leaf_begin;
      float2 state = make_float2(shift[h], acc[acc_count + 2 * h]);
      if (last_leaf_begin) {
        state = row_state(h);
        if (sees_last) state = merge_row(h, state);
#pragma unroll
        for (int x = 2 * h; x < on_chip; x += 4) {
          float2 old;
          if (x < merged_registers)
            old = make_float2(merged[x < merged_registers ? x : 0], merged[x < merged_registers ? x + 1 : 0]);
          else
            old = reinterpret_cast<const float2*>(&shared_vector(x / 4 * 4))[h];
          acc[x] = sees_last ? __fmaf_rn(acc[x], leaf_scale[h], old.x * merged_scale[h]) : old.x;
          acc[x + 1] = sees_last ? __fmaf_rn(acc[x + 1], leaf_scale[h], old.y * merged_scale[h]) : old.y;
        }
        update_global(true, false, [&](int x, float4& old) {
          float a = h ? old.z : old.x, b = h ? old.w : old.y;
          acc[x + 2 * h] = sees_last ? __fmaf_rn(acc[x + 2 * h], leaf_scale[h], a * merged_scale[h]) : a;
          acc[x + 2 * h + 1] = sees_last ? __fmaf_rn(acc[x + 2 * h + 1], leaf_scale[h], b * merged_scale[h]) : b;
        });
      }
      divide<acc_count>(acc, h, state.y);
      int row = first_row() + 8 * h, query = position - t.context;  // index among the sequence's queries
      bool valid = query < t.q_len && row < p.positions * p.together;
      int64_t head = t.head + row - p.position_of(row) * p.together;
      int64_t offset = ((t.q0 + query) * int64_t{p.heads} + head) * kDim;
      store_row<acc_count>(acc, h, static_cast<__nv_bfloat16*>(p.out) + offset, valid);
      if (p.shift && valid && read_tid_x() % 4 == 0)
        p.shift[(head * p.pads + t.q0 / kStatisticsPad + t.s) * kStatisticsPad + query] = state.x - log2f(state.y);
    }
  }
  if (group == 0) pingpong_wait();  // consumes the last warpgroup's final signal
}

// The attention forward kernel; see the top of the file. Inconsistent `starts` fill a packed result with NaN.
template <int kDim>
__global__ void __launch_bounds__(Shared<kDim>::threads, 1)
    attention_forward(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                      const __grid_constant__ CUtensorMap v, const Problem p) {
  // The declared alignment, which the swizzle needs, makes shared addresses compile-time constants.
  // tests/ops/test_attention_on_cpu.py replaces the next line by its text.
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared<kDim>& sh = *reinterpret_cast<Shared<kDim>*>(raw);
  if (threadIdx.x == 0) {
    constexpr int warps = Shared<kDim>::groups * 4;
    mbarrier_init(&sh.tile_ready, 1);
    mbarrier_init(&sh.q_full, 1);
    mbarrier_init(&sh.q_empty, warps + 2);
    mbarrier_init(&sh.patch_full, 1);
    for (int i = 0; i < Shared<kDim>::stages; ++i) {
      mbarrier_init(&sh.k_full[i], 1);
      mbarrier_init(&sh.k_empty[i], warps);
      mbarrier_init(&sh.v_full[i], 1);
      mbarrier_init(&sh.v_empty[i], warps);
    }
    fence_mbarrier_init();
  }
  for (int x = threadIdx.x; x < Shared<kDim>::ones / 8; x += blockDim.x)
    for (int i = 0; i < Shared<kDim>::stages; ++i)
      reinterpret_cast<uint4*>(sh.v[i] + kKeys * kDim)[x] = make_uint4(0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80);
  fence_proxy_async();
  griddep_wait();
  griddep_launch_dependents();
  __syncthreads();
  int64_t begin = load_int(p.starts, 0), end = load_int(p.starts, p.sequences);
  if (begin != 0 || end > p.tokens || (!p.page && end != p.tokens)) {
    if (p.page) return;  // paged: leave the rows of `out` as they are
    int64_t vectors = int64_t{p.tokens} * p.heads * kDim / 8;
    constexpr uint32_t nan = 0x7fc07fc0;
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < vectors; i += int64_t{gridDim.x} * blockDim.x)
      static_cast<uint4*>(p.out)[i] = make_uint4(nan, nan, nan, nan);
    return;
  }
  if (threadIdx.x / 128 == 0) {
    setmaxnreg_dec<Plan<kDim>::producer_registers>();
    if (threadIdx.x < 32)
      load_queries(sh, &q, p);
    else if (threadIdx.x < 64)
      load_kv<kDim, false>(sh, &k, p);
    else if (threadIdx.x < 96)
      load_kv<kDim, true>(sh, &v, p);
  } else {
    setmaxnreg_inc<Plan<kDim>::consumer_registers>();
    attend<kDim>(sh, p);
  }
}

// Host code.


template <int kDim>
cudaError_t launch(const AlignkitAttention& arguments, void* scratch, int64_t scratch_bytes, cudaStream_t stream) {
  constexpr int rows = Shared<kDim>::rows, bytes = sizeof(Shared<kDim>);
  constexpr int scratch_per_cta =
      Plan<kDim>::merged_global * Shared<kDim>::groups * 128 * static_cast<int>(sizeof(float4));
  static_assert(scratch_per_cta == (kDim == 256 ? kSpillBytes256 : 0));
  Problem p = {arguments,
               page_box_rows(arguments.page, kKeys),
               rows / arguments.together,
               (1 << 16) / arguments.together + 1,
               arguments.heads / arguments.kv_heads,
               static_cast<float4*>(scratch)};
  int device, sms;
  CUtensorMap q, k, v;
  if (cudaError_t e = make_tensor_map(&q, p.q, p.tokens, p.heads, kDim, p.together, p.positions)) return e;
  if (cudaError_t e = make_tensor_map(&k, p.k, p.kv_rows, p.kv_heads, kDim, 1, p.box_rows)) return e;
  if (cudaError_t e = make_tensor_map(&v, p.v, p.kv_rows, p.kv_heads, kDim, 1, p.box_rows)) return e;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return e;
  if (cudaError_t e = cudaFuncSetAttribute(attention_forward<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
    return e;
  if constexpr (scratch_per_cta > 0) sms = static_cast<int>(std::min<int64_t>(sms, scratch_bytes / scratch_per_cta));
  if (sms == 0) return cudaErrorInvalidValue;
  int64_t tiles = (int64_t{p.tokens} / p.positions + p.sequences) * (p.heads / p.together);
  unsigned ctas = static_cast<unsigned>(std::max<int64_t>(std::min<int64_t>(tiles, sms), 1));
  return launch_pdl(attention_forward<kDim>, ctas, Shared<kDim>::threads, bytes, stream, q, k, v, p);
}

}  // namespace
}  // namespace alignkit

// Run the forward pass. `memory` is scratch for dim 256: kSpillBytes256 per CTA; `bytes` limits the number of CTAs, as
// does the number of SMs. Returns a cudaError_t.
extern "C" int alignkit_attention_forward(const AlignkitAttention* p, void* memory, int64_t bytes,
                                          cudaStream_t stream) {
  if (p->page % 16 || p->tokens < 0 || p->tokens * int64_t{p->heads} >= 1 << 30 || p->kv_heads < 1 ||
      p->heads % p->kv_heads || (p->together != 1 && p->together * p->kv_heads != p->heads) ||
      p->together > 64)
    return cudaErrorInvalidValue;
  using alignkit::launch;
  if (p->dim == 256) return launch<256>(*p, memory, bytes, stream);
  if (p->dim == 128) return launch<128>(*p, memory, bytes, stream);
  if (p->dim == 96) return launch<96>(*p, memory, bytes, stream);
  if (p->dim == 64) return launch<64>(*p, memory, bytes, stream);
  return cudaErrorInvalidValue;
}

ALIGNKIT_FUNCTION(alignkit_attention_forward)
