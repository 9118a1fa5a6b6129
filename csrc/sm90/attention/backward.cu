// Causal attention, backward, of packed sequences: two kernels after each other, one for the gradients of queries, one for
// those of keys and values.
//
// A tile of 64 rows for each of two or three groups of warps stays, and blocks of 64 rows pass by, ascending: keys and
// values by a tile of queries, or queries, head after head of a group, by a tile of keys. Two warps have the copy engine
// bring them. The other groups make the probabilities again from the scores and a number for each query, and keep their
// gradients in registers. What a thread holds of a product of 64 by 64, rounded, is what it has to give to the next one:
// no probability goes through shared memory. While a group computes, another has the tensor core; and a group begins
// the next block's products before the last one of a block is done.
//
// Tiles are dealt out to as many blocks of threads as there are multiprocessors, those that see most first, in turns
// that go to and fro. Lengths are read on the device.
#include "backward.cuh"

ALIGNKIT_LAYOUT(AlignkitAttentionBackward, q, k, v, grad, shift, delta, dq, dk, dv, starts, tokens, sequences, heads,
                kv_heads, dim, pads, factor, scale)

namespace alignkit {
namespace {

// Groups of 64 rows, blocks on their way, and registers of threads that bring them and that compute.
template <int kDim, bool kByKey>
struct Plan;

template <>
struct Plan<128, false> {
  static constexpr int groups = 2, stages = 4, few = 24, many = 240;
};

template <>
struct Plan<128, true> {
  static constexpr int groups = 2, stages = 4, few = 24, many = 240;
};

template <bool kByKey>
struct Plan<96, kByKey> {
  static constexpr int groups = 2, stages = 4, few = 40, many = 232;
};

template <bool kByKey>
struct Plan<64, kByKey> {
  static constexpr int groups = 2, stages = 8, few = 40, many = 232;
};

// kByKey: keys and values stay, and queries and the result's gradients pass by; else the other way round.
template <int kDim, bool kByKey>
struct Shared {
  using plan = Plan<kDim, kByKey>;
  static constexpr bool by_key = kByKey;
  static constexpr int groups = plan::groups, stages = plan::stages, rows = groups * 64, dim = kDim;
  static constexpr int warps = groups * 4, few = plan::few, many = plan::many;
  static constexpr int halves = kHalves<kDim>, width = halves * kHalf, threads = (groups + 1) * 128;
  __nv_bfloat16 stays[2][rows * width];
  __nv_bfloat16 passes[stages][2][kBlock * width];
  alignas(128) float statistics[kByKey ? stages : 1][2][kBlock];  // shift and delta of the queries that pass
  Tile tile[2];                                                   // in turn: one is read while the next is found
  uint64_t found, tile_full, tile_empty, full[stages], empty[stages];
  uint64_t on_its_way;  // a block of which rows have to be wiped out

  __device__ void init() {
    for (int i = 0; i < stages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], warps);
    }
  }
};

// The warp that has blocks brought.
template <int kDim, bool kByKey>
__device__ __forceinline__ void bring_blocks(Shared<kDim, kByKey>& sh, const CUtensorMap* a, const CUtensorMap* b,
                                             const Problem& p) {
  constexpr int stages = Shared<kDim, kByKey>::stages, halves = Shared<kDim, kByKey>::halves;
  constexpr int rows = Shared<kDim, kByKey>::rows;
  constexpr int bytes = 2 * kBlock * Shared<kDim, kByKey>::width * 2 + (kByKey ? 2 * kBlock * 4 : 0);
  auto lane = [] { return static_cast<int>(thread_again() % 32); };  // read again: registers are short
  static_assert((stages & stages - 1) == 0);
  unsigned block = 0, turns = 0;  // blocks of all tiles; that of the tile, and twice that of `on_its_way`
  for (;; turns ^= 1) {
    barrier_wait(&sh.found, turns & 1);
    Tile t = sh.tile[turns & 1];
    __syncwarp();
    if (t.s < 0) return;
    if (lane() == 0) barrier_arrive(&sh.tile_empty);  // the next tile may be said to be found
    int begin = kByKey ? t.first : 0, end = kByKey ? t.q_len : min(t.q_len, t.first + rows);
    int group = p.heads;  // divided again for each tile
    asm volatile("" : "+r"(group));
    group /= p.kv_heads;
    int head = kByKey ? t.head * group : t.head / group;
#pragma unroll 1
    for (int last = kByKey ? head + group : head + 1; head < last; ++head) {
#pragma unroll 1
      for (int i = begin; i < end; i += kBlock, ++block) {
        int left = t.q_len - i, stage = static_cast<int>(block % stages);
        uint64_t* full = left >= kBlock ? &sh.full[stage] : &sh.on_its_way;
        barrier_wait(&sh.empty[stage], block / stages % 2 ^ 1);
        if (lane() == 0) {
          barrier_expect(full, bytes);
#pragma unroll
          for (int h = 0; h < halves; ++h) {
            copy_box(sh.passes[stage][0] + h * kBlock * kHalf, a, h * kHalf, head, t.q0 + i, 0, full);
            copy_box(sh.passes[stage][1] + h * kBlock * kHalf, b, h * kHalf, head, t.q0 + i, 0, full);
          }
          if (kByKey) {
            int64_t at = (int64_t{head} * p.pads + t.q0 / kStatistics + t.s) * kStatistics + i;
            copy_bytes(sh.statistics[stage][0], p.shift + at, kBlock * 4, full);
            copy_bytes(sh.statistics[stage][1], p.delta + at, kBlock * 4, full);
          }
        }
        __syncwarp();
        if (left < kBlock) {  // rows that are not the sequence's may be anything, which 0 times is no 0
          barrier_wait(full, turns >> 1);
          turns ^= 2;
#pragma unroll 1
          for (int x = left * kHalf + lane() * 8; x < kBlock * kHalf; x += 32 * 8)
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

// A group of four warps and its 64 queries of each tile.
template <int kDim>
__device__ __forceinline__ void for_queries(Shared<kDim, false>& sh, const Problem& p) {
  constexpr int stages = Shared<kDim, false>::stages, rows = Shared<kDim, false>::rows, sums = kDim / 2;
  constexpr int steps = kDim / 16, half_step = kBlock * kHalf * 2 >> 4, width = kHalves<kDim> * kHalf;
  constexpr int other = kBlock * width * 2 >> 4;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  bool leads = threadIdx.x % 32 == 0;
  uint64_t k0 = operand<false>(sh.passes[0][0]), k0_by_row = operand<true>(sh.passes[0][0]);
  float factor = p.factor, s[32], dp[32], dq[sums];
  uint32_t q[steps][4], g[steps][4], ds[4][4];
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
      uint32_t here = (row ^ i % 4 * 32) + i / 4 * rows * kHalf * 2;
      load_matrices<false>(q[i], here);
      load_matrices<false>(g[i], here + rows * width * 2);
    }
    int begin = t.first + group * 64, n = begin < t.q_len ? begin / kBlock + 1 : 0;
    int all = blocks(min(t.q_len, t.first + rows));
    float shift[2], delta[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int place = begin + row_again() + 8 * h;
      int64_t at = (int64_t{t.head} * p.pads + t.q0 / kStatistics + t.s) * kStatistics + place;
      shift[h] = place < t.q_len ? p.shift[at] : 0.0f;
      delta[h] = place < t.q_len ? p.delta[at] : 0.0f;
    }
    int64_t out = (int64_t{t.q0} + begin) * p.heads + t.head;
    int left = t.q_len - begin;
    __syncwarp();
    if (leads) barrier_arrive(&sh.tile_empty);

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
        multiply<false, false>(__nv_bfloat16(), dp, g[j],
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
#pragma unroll
    for (int x = 0; x < sums; ++x) dq[x] = dq[x] * p.scale;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = row_again() + 8 * h;
      store_row<kDim / 2>(dq, h, static_cast<__nv_bfloat16*>(p.dq) + (out + int64_t{row} * p.heads) * kDim, row < left);
    }
  }
}

// A group of four warps and its 64 keys of each tile.
template <int kDim>
__device__ __forceinline__ void for_keys(Shared<kDim, true>& sh, const Problem& p) {
  constexpr int stages = Shared<kDim, true>::stages, rows = Shared<kDim, true>::rows, sums = kDim / 2;
  constexpr int steps = kDim / 16, half_step = kBlock * kHalf * 2 >> 4, width = kHalves<kDim> * kHalf;
  constexpr int other = kBlock * width * 2 >> 4;
  constexpr int still_half_step = rows * kHalf * 2 >> 4, still_other = rows * width * 2 >> 4;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  bool leads = threadIdx.x % 32 == 0;
  uint64_t k0 = operand<false>(sh.stays[0]) + group * (64 * kHalf * 2 >> 4);
  uint64_t q0 = operand<false>(sh.passes[0][0]), q0_by_row = operand<true>(sh.passes[0][0]);
  float factor = p.factor, s[32], dp[32], dk[sums], dv[sums];
  uint32_t probability[4][4], ds[4][4];
  int stage = 0, phase = 0, turn = 0;
  for (;;) {
    barrier_wait(&sh.tile_full, turn);
    const Tile& t = sh.tile[turn];
    turn ^= 1;
    if (t.s < 0) return;
    int all = blocks(t.q_len - t.first), heads = p.heads / p.kv_heads;
    int here = t.q_len - t.first - group * 64;  // keys of this group

    auto taken = [&](int stage) {
      if (leads) barrier_arrive(&sh.empty[stage]);
    };
    auto pass = [&](int count) {  // blocks of queries before this group's keys
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        barrier_wait(&sh.full[stage], phase);
        __syncwarp();
        taken(stage);
        step<stages>(stage, phase);
      }
    };
    int offset = 0;
    auto multiply_next = [&] {  // begins the scores, and the product of the values and the result's gradient
      barrier_wait(&sh.full[stage], phase);
      offset = stage * 2 * other;
      products_begin();
#pragma unroll
      for (int j = 0; j < steps; ++j)
        multiply<false, false>(s, k0 + j / 4 * still_half_step + j % 4 * kNext<false>,
                               q0 + offset + j / 4 * half_step + j % 4 * kNext<false>, j > 0);
      products_end();
      products_begin();
#pragma unroll
      for (int j = 0; j < steps; ++j)
        multiply<false, false>(dp, k0 + still_other + j / 4 * still_half_step + j % 4 * kNext<false>,
                               q0 + offset + other + j / 4 * half_step + j % 4 * kNext<false>, j > 0);
      products_end();
    };
    if (here <= 0) {
      pass(heads * all);
      if (leads) barrier_arrive(&sh.tile_empty);
      continue;
    }
#pragma unroll
    for (int x = 0; x < sums; ++x) dk[x] = dv[x] = 0;
    products_taken(dk);  // here, and not where products are under way
    products_taken(dv);
    int before = -1, block = group, left = heads * (all - group);
    pass(group);
    multiply_next();
#pragma unroll 1
    for (;;) {
      products_wait<1>();
      products_taken(s);
      if (before >= 0) taken(before);
      const float* shift = sh.statistics[stage][0] + column_again();
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float2 of = *reinterpret_cast<const float2*>(shift + 8 * j);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          s[4 * j + 2 * h] = power_of_2(__fmaf_rn(s[4 * j + 2 * h], factor, of.x));
          s[4 * j + 2 * h + 1] = power_of_2(__fmaf_rn(s[4 * j + 2 * h + 1], factor, of.y));
        }
      }
      if (block == group) {  // queries before the key
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
        multiply<false, true>(__nv_bfloat16(), dv, probability[j], q0_by_row + offset + other + j * kNext<true>, true);
      products_end();
      products_wait<1>();
      products_taken(dp);
      if (left == 1 && leads) barrier_arrive(&sh.tile_empty);
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
        multiply<false, true>(__nv_bfloat16(), dk, ds[j], q0_by_row + offset + j * kNext<true>, true);
      products_end();
      before = stage;
      step<stages>(stage, phase);
      products_wait<1>();
      if (--left == 0) break;
      if (++block == all) {
        block = group;
        pass(group);
      }
      multiply_next();
    }
    products_wait<0>();
    products_taken(dk);
    products_taken(dv);
    taken(before);
#pragma unroll
    for (int x = 0; x < sums; ++x) dk[x] = dk[x] * p.scale;
    int64_t out = (int64_t{t.q0} + t.first + group * 64) * p.kv_heads + t.head;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = row_again() + 8 * h;
      int64_t at = (out + int64_t{row} * p.kv_heads) * kDim;
      store_row<kDim / 2>(dk, h, static_cast<__nv_bfloat16*>(p.dk) + at, row < here);
      store_row<kDim / 2>(dv, h, static_cast<__nv_bfloat16*>(p.dv) + at, row < here);
    }
  }
}

template <int kDim, bool kByKey>
__device__ __forceinline__ void compute(Shared<kDim, kByKey>& sh, const Problem& p) {
  if constexpr (kByKey)
    for_keys(sh, p);
  else
    for_queries(sh, p);
}

template <int kDim>
cudaError_t launch_of(const Problem& p, cudaStream_t stream) {
  return launch_both<Shared<kDim, false>, Shared<kDim, true>>(p, stream);
}

}  // namespace
}  // namespace alignkit

// Returns a cudaError_t.
extern "C" int alignkit_attention_backward(const AlignkitAttentionBackward* p, cudaStream_t stream) {
  if (p->tokens < 0 || p->tokens * int64_t{p->heads} >= 1 << 30 || p->heads % p->kv_heads) return cudaErrorInvalidValue;
  if (p->dim == 128) return alignkit::launch_of<128>(*p, stream);
  if (p->dim == 96) return alignkit::launch_of<96>(*p, stream);
  if (p->dim == 64) return alignkit::launch_of<64>(*p, stream);
  return cudaErrorInvalidValue;
}
