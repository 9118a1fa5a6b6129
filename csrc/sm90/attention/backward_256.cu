// Causal attention, backward, of packed sequences with heads of 256: the two kernels of backward.cu, whose products and
// sums have the same order, for heads of which a thread's registers hold one gradient of 64 rows and no operand beside it.
//
// By query: a tile is 64 rows for each of two groups of warps. Queries and the result's gradients stay in shared memory,
// where there is room for two blocks of keys, which are needed again for the gradients, and for one of values.
//
// By key: a tile is 64 keys. One group makes the probabilities and keeps the gradients of values; the other has those of
// keys, for which it takes the probabilities, before they are rounded, from shared memory.
#include "backward.cuh"

namespace alignkit {
namespace {

constexpr int kDim = 256, kSums = kDim / 2, kParts = kDim / kHalf, kElements = kBlock * kDim;
constexpr int kBlockStep = kElements * 2 >> 4;  // of an operand, to the next block
constexpr int kWarps = 8;                       // that compute

// Registers of threads that bring rows, and that compute.
struct ByQuery {
  static constexpr bool by_key = false;
  static constexpr int dim = kDim, halves = kParts, warps = kWarps, threads = 128 + warps * 32;
  static constexpr int rows = 128, few = 24, many = 240;
  __nv_bfloat16 stays[2][rows * kDim];  // queries, and gradients of the result
  __nv_bfloat16 k[2][kElements], v[kElements];
  Tile tile[2];  // in turn: one is read while the next is found
  uint64_t found, tile_full, tile_empty, k_full[2], k_empty[2], v_full, v_empty;
  uint64_t on_its_way;  // a block of which rows have to be wiped out

  __device__ void init() {
    for (int i = 0; i < 2; ++i) {
      barrier_init(&k_full[i], 1);
      barrier_init(&k_empty[i], kWarps);
    }
    barrier_init(&v_full, 1);
    barrier_init(&v_empty, kWarps);
  }
};

struct ByKey {
  static constexpr bool by_key = true;
  static constexpr int dim = kDim, halves = kParts, warps = kWarps, threads = 128 + warps * 32;
  static constexpr int rows = 64, few = 40, many = 232;
  __nv_bfloat16 stays[2][rows * kDim];      // keys, values
  __nv_bfloat16 passes[2][2][kElements];    // queries, and gradients of the result
  float4 probability[2][kBlock / 8][128];   // of a block: what a thread of the first group gives to one of the second
  alignas(128) float statistics[2][2][kBlock];  // shift and delta of the queries that pass
  Tile tile[2];
  uint64_t found, tile_full, tile_empty, full[2], empty[2], given[2], taken[2];
  uint64_t on_its_way;

  __device__ void init() {
    for (int i = 0; i < 2; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], kWarps);
      barrier_init(&given[i], kWarps / 2);
      barrier_init(&taken[i], kWarps / 2);
    }
  }
};

// What a warp that brings rows reads again, and does not keep: registers are short.
__device__ __forceinline__ bool leads_again() { return thread_again() % 32 == 0; }

__device__ __forceinline__ void bring_block(__nv_bfloat16* to, const CUtensorMap* from, int head, int row,
                                            uint64_t* full) {
#pragma unroll
  for (int h = 0; h < kParts; ++h) copy_box(to + h * kBlock * kHalf, from, h * kHalf, head, row, 0, full);
}

// The rows of blocks from `left` on become 0, by a warp: rows that are not the sequence's may be anything, which 0 times
// is no 0.
template <int kBlocks>
__device__ __forceinline__ void wipe(__nv_bfloat16* to, int left) {
#pragma unroll 1
  for (int x = left * kHalf + static_cast<int>(thread_again() % 32) * 8; x < kBlock * kHalf; x += 32 * 8)
#pragma unroll
    for (int h = 0; h < kBlocks * kParts; ++h)
      *reinterpret_cast<uint4*>(to + h * kBlock * kHalf + x) = make_uint4(0, 0, 0, 0);
  shared_written();
  __syncwarp();
}

// The warp that has keys and values brought.
__device__ __forceinline__ void bring_blocks(ByQuery& sh, const CUtensorMap* k, const CUtensorMap* v,
                                             const Problem& p) {
  unsigned block = 0, turns = 0;  // blocks of all tiles; that of the tile, and twice that of `on_its_way`
  for (;; turns ^= 1) {
    barrier_wait(&sh.found, turns & 1);
    Tile t = sh.tile[turns & 1];
    __syncwarp();
    if (t.s < 0) return;
    if (leads_again()) barrier_arrive(&sh.tile_empty);
    int group = p.heads;  // divided again for each tile
    asm volatile("" : "+r"(group));
    int head = t.head / (group / p.kv_heads), end = min(t.q_len, t.first + ByQuery::rows);
#pragma unroll 1
    for (int i = 0; i < end; i += kBlock, ++block) {
      auto bring = [&](__nv_bfloat16* to, const CUtensorMap* from, uint64_t* empty, unsigned visits, uint64_t* full) {
        bool whole = t.q_len - i >= kBlock;
        uint64_t* there = whole ? full : &sh.on_its_way;
        barrier_wait(empty, visits % 2 ^ 1);
        if (leads_again()) {
          barrier_expect(there, kElements * 2);
          bring_block(to, from, head, t.q0 + i, there);
        }
        __syncwarp();
        if (!whole) {
          barrier_wait(there, turns >> 1);
          turns ^= 2;
          wipe<1>(to, t.q_len - i);
          if (leads_again()) barrier_arrive(full);
        }
      };
      bring(sh.k[block % 2], k, &sh.k_empty[block % 2], block / 2, &sh.k_full[block % 2]);
      bring(sh.v, v, &sh.v_empty, block, &sh.v_full);
    }
  }
}

// The warp that has queries, gradients of the result and their statistics brought.
__device__ __forceinline__ void bring_blocks(ByKey& sh, const CUtensorMap* q, const CUtensorMap* grad,
                                             const Problem& p) {
  unsigned block = 0, turns = 0;
  for (;; turns ^= 1) {
    barrier_wait(&sh.found, turns & 1);
    Tile t = sh.tile[turns & 1];
    __syncwarp();
    if (t.s < 0) return;
    if (leads_again()) barrier_arrive(&sh.tile_empty);
    int group = p.heads / p.kv_heads, head = t.head * group;
#pragma unroll 1
    for (int last = head + group; head < last; ++head) {
#pragma unroll 1
      for (int i = t.first; i < t.q_len; i += kBlock, ++block) {
        int left = t.q_len - i, stage = static_cast<int>(block % 2);
        uint64_t* there = left >= kBlock ? &sh.full[stage] : &sh.on_its_way;
        barrier_wait(&sh.empty[stage], block / 2 % 2 ^ 1);
        if (leads_again()) {
          int64_t at = (int64_t{head} * p.pads + t.q0 / kStatistics + t.s) * kStatistics + i;
          barrier_expect(there, 2 * kElements * 2 + 2 * kBlock * 4);
          bring_block(sh.passes[stage][0], q, head, t.q0 + i, there);
          bring_block(sh.passes[stage][1], grad, head, t.q0 + i, there);
          copy_bytes(sh.statistics[stage][0], p.shift + at, kBlock * 4, there);
          copy_bytes(sh.statistics[stage][1], p.delta + at, kBlock * 4, there);
        }
        __syncwarp();
        if (left < kBlock) {
          barrier_wait(there, turns >> 1);
          turns ^= 2;
          wipe<2>(sh.passes[stage][0], left);
          if (leads_again()) barrier_arrive(&sh.full[stage]);
        }
      }
    }
  }
}

// Begins d = a . b^T of 64 rows of heads each, of which the next 64 elements of a lie `rows` rows further.
template <int kRows>
__device__ __forceinline__ void multiply_heads(float (&d)[32], uint64_t a, uint64_t b) {
  constexpr int part = kRows * kHalf * 2 >> 4, block_part = kBlock * kHalf * 2 >> 4;
  products_begin();
#pragma unroll
  for (int j = 0; j < kDim / 16; ++j)
    multiply<false, false>(d, a + j / 4 * part + j % 4 * kNext<false>, b + j / 4 * block_part + j % 4 * kNext<false>,
                           j > 0);
  products_end();
}

// Begins d += a . b of a block b of rows.
__device__ __forceinline__ void add_rows(float (&d)[kSums], const uint32_t (&a)[4][4], uint64_t b) {
  products_begin();
#pragma unroll
  for (int j = 0; j < 4; ++j) multiply<false, true>(__nv_bfloat16(), d, a[j], b + j * kNext<true>, true);
  products_end();
}

// Of 64 rows: nothing yet; here, and not where products are under way.
__device__ __forceinline__ void clear(float (&d)[kSums]) {
#pragma unroll
  for (int x = 0; x < kSums; ++x) d[x] = 0;
  products_taken(d);
}

// A group's 64 rows of d to `out`, [.., stride heads, kDim], as far as they are of the `left` ones.
__device__ __forceinline__ void store(const float (&d)[kSums], void* out, int64_t first, int stride, int left) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = row_again() + 8 * h;
    store_row<kSums>(d, h, static_cast<__nv_bfloat16*>(out) + (first + int64_t{row} * stride) * kDim, row < left);
  }
}

// A group of four warps and its 64 queries of each tile.
__device__ __forceinline__ void for_queries(ByQuery& sh, const Problem& p) {
  constexpr int group_step = 64 * kHalf * 2 >> 4, rows = ByQuery::rows;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  bool leads = threadIdx.x % 32 == 0;
  constexpr int other = rows * kDim * 2 >> 4;  // from queries to gradients of the result
  uint64_t q0 = operand<false>(sh.stays[0]) + group * group_step;
  uint64_t k0 = operand<false>(sh.k[0]), k0_by_row = operand<true>(sh.k[0]), v0 = operand<false>(sh.v);
  float factor = p.factor, s[32], dp[32], dq[kSums];
  uint32_t ds[4][4];
  unsigned block = 0;  // of all tiles
  for (int turn = 0;;) {
    barrier_wait(&sh.tile_full, turn);
    const Tile& t = sh.tile[turn];  // read again where it is needed: registers are short
    turn ^= 1;
    if (t.s < 0) return;
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
    auto wait_for_keys = [&] { barrier_wait(&sh.k_full[block % 2], block / 2 % 2); };
    auto wait_for_values = [&] { barrier_wait(&sh.v_full, block % 2); };
    auto keys_taken = [&](unsigned block) {
      if (leads) barrier_arrive(&sh.k_empty[block % 2]);
    };
    auto values_taken = [&] {
      if (leads) barrier_arrive(&sh.v_empty);
    };
    auto tile_taken = [&] {
      if (leads) barrier_arrive(&sh.tile_empty);
    };
    auto multiply_next = [&] {  // begins the scores, and the product of the result's gradient and the values
      wait_for_keys();
      multiply_heads<rows>(s, again(q0), k0 + block % 2 * kBlockStep);
      wait_for_values();
      multiply_heads<rows>(dp, again(q0) + other, v0);
    };
    clear(dq);
    if (n) {
      multiply_next();
#pragma unroll 1
      for (int i = 0;;) {
        products_wait<1>();
        products_taken(s);
        if (i) keys_taken(block - 1);
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
        values_taken();
        if (i + 1 == n) tile_taken();
#pragma unroll
        for (int x = 0; x < 32; ++x) s[x] = s[x] * (dp[x] - delta[x / 2 % 2]);
        round(s, ds);
        add_rows(dq, ds, k0_by_row + block % 2 * kBlockStep);
        ++block;
        if (++i == n) break;
        multiply_next();
      }
      products_wait<0>();
      products_taken(dq);
      keys_taken(block - 1);
    } else {
      __syncwarp();
      tile_taken();
    }
#pragma unroll 1
    for (int i = n; i < all; ++i, ++block) {  // other groups' blocks
      wait_for_keys();
      __syncwarp();
      keys_taken(block);
      wait_for_values();
      __syncwarp();
      values_taken();
    }
#pragma unroll
    for (int x = 0; x < kSums; ++x) dq[x] = dq[x] * p.scale;
    store(dq, p.dq, (int64_t{t.q0} + begin) * p.heads + t.head, p.heads, t.q_len - begin);
  }
}

// A group of four warps: the probabilities of each tile of 64 keys, and the gradients of its values; or, kOfKeys, those of
// its keys.
template <bool kOfKeys>
__device__ __forceinline__ void for_keys(ByKey& sh, const Problem& p) {
  bool leads = threadIdx.x % 32 == 0;
  uint64_t still = operand<false>(sh.stays[kOfKeys]), passing = operand<false>(sh.passes[0][kOfKeys]);
  uint64_t summed = operand<true>(sh.passes[0][!kOfKeys]);
  float factor = p.factor, s[32], sums[kSums];  // s: of the other group, dP
  uint32_t a[4][4];
  unsigned block = 0;  // of all tiles
  for (int turn = 0;;) {
    barrier_wait(&sh.tile_full, turn);
    const Tile& t = sh.tile[turn];
    turn ^= 1;
    if (t.s < 0) return;
    int all = blocks(t.q_len - t.first), n = p.heads / p.kv_heads * all, diagonal = 0;
    auto taken = [&](unsigned block) {
      if (leads) barrier_arrive(&sh.empty[block % 2]);
    };
    clear(sums);
#pragma unroll 1
    for (int i = 0; i < n; ++i, ++block) {
      int stage = static_cast<int>(block % 2), phase = static_cast<int>(block / 2 % 2);
      barrier_wait(&sh.full[stage], phase);
      multiply_heads<kBlock>(s, still, passing + stage * 2 * kBlockStep);
      products_wait<1>();
      if (i) taken(block - 1);
      products_wait<0>();
      products_taken(s);
      products_taken(sums);
      if (i + 1 == n && leads) barrier_arrive(&sh.tile_empty);
      const float* statistics = sh.statistics[stage][kOfKeys] + column_again();
      float4* shared = &sh.probability[stage][0][thread_again() % 128];
      if constexpr (!kOfKeys) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float2 of = *reinterpret_cast<const float2*>(statistics + 8 * j);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            s[4 * j + 2 * h] = power_of_2(__fmaf_rn(s[4 * j + 2 * h], factor, of.x));
            s[4 * j + 2 * h + 1] = power_of_2(__fmaf_rn(s[4 * j + 2 * h + 1], factor, of.y));
          }
        }
        if (i == diagonal) {  // queries before the key
          diagonal += all;
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
        barrier_wait(&sh.taken[stage], phase ^ 1);
#pragma unroll
        for (int j = 0; j < 8; ++j)
          shared[j * 128] = make_float4(s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]);
        __syncwarp();
        if (leads) barrier_arrive(&sh.given[stage]);
      } else {
        barrier_wait(&sh.given[stage], phase);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float2 of = *reinterpret_cast<const float2*>(statistics + 8 * j);
          float4 probability = shared[j * 128];
          s[4 * j] = probability.x * (s[4 * j] - of.x);
          s[4 * j + 1] = probability.y * (s[4 * j + 1] - of.y);
          s[4 * j + 2] = probability.z * (s[4 * j + 2] - of.x);
          s[4 * j + 3] = probability.w * (s[4 * j + 3] - of.y);
        }
        __syncwarp();
        if (leads) barrier_arrive(&sh.taken[stage]);
      }
      round(s, a);
      add_rows(sums, a, summed + stage * 2 * kBlockStep);
    }
    products_wait<0>();
    products_taken(sums);
    taken(block - 1);
    if constexpr (kOfKeys)
#pragma unroll
      for (int x = 0; x < kSums; ++x) sums[x] = sums[x] * p.scale;
    store(sums, kOfKeys ? p.dk : p.dv, (int64_t{t.q0} + t.first) * p.kv_heads + t.head, p.kv_heads, t.q_len - t.first);
  }
}

__device__ __forceinline__ void compute(ByQuery& sh, const Problem& p) { for_queries(sh, p); }

__device__ __forceinline__ void compute(ByKey& sh, const Problem& p) {
  if (threadIdx.x / 128 == 1)
    for_keys<false>(sh, p);
  else
    for_keys<true>(sh, p);
}

}  // namespace
}  // namespace alignkit

// Of heads of 256. Returns a cudaError_t.
extern "C" int alignkit_attention_backward_256(const AlignkitAttentionBackward* p, cudaStream_t stream) {
  if (p->dim != alignkit::kDim || p->tokens < 0 || p->tokens * int64_t{p->heads} >= 1 << 30 || p->heads % p->kv_heads)
    return cudaErrorInvalidValue;
  return alignkit::launch_both<alignkit::ByQuery, alignkit::ByKey>(*p, stream);
}
