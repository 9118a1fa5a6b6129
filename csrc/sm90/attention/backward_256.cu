// Causal attention, backward, for packed sequences and head dimension 256: a dQ kernel, then a dK/dV kernel.
//
// The order of summation and the launch shape are those of backward.cu, which also has the entry point for dimensions
// 64, 96 and 128. Tiles, stages and launch shape change no bits. At head dimension 256 a thread's registers
// hold one gradient of 64 rows and no operand beside it, so operands stay in shared memory.
//
// dQ kernel: a tile is 64 queries for each of two consumer warpgroups. Q and dO are resident. Two stages of keys and
// one of values are streamed, because dQ += dS K needs the keys longer than the values.
//
// dK/dV kernel: a tile is 64 keys. One warpgroup computes the probabilities and accumulates dV. The other accumulates
// dK; it reads the unrounded probabilities from shared memory.
#include "backward.cuh"

namespace alignkit {
namespace {

constexpr int kDim = 256;  // schedule: the head dimension of this file, fixed; backward.cu has the others
constexpr int kAccCount = kDim / 2, kHeadBoxes = kDim / kBoxColumns, kBlockElements = kBlock * kDim;
constexpr int kBlockStep = kBlockElements * 2 >> 4;  // descriptor step to the next block
constexpr int kWarps = 8;                            // schedule: consumer warps, fixed: two warpgroups

// Shared memory and setmaxnreg register counts of the dQ kernel.
struct DqShared {
  static constexpr bool dkv = false;
  static constexpr int dim = kDim, boxes = kHeadBoxes, warps = kWarps, threads = 128 + warps * 32;
  static constexpr int rows = 128, producer_registers = 24, consumer_registers = 240;
  __nv_bfloat16 resident[2][rows * kDim];  // Q, dO
  __nv_bfloat16 k[2][kBlockElements], v[kBlockElements];
  Tile tile[2];  // double-buffered: the scheduler writes one while consumers read the other
  uint64_t tile_ready, tile_full, tile_empty, k_full[2], k_empty[2], v_full, v_empty;
  uint64_t patch_full;  // full barrier of a block whose rows past the sequence's end the producer zeroes first

  __device__ void init() {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(&k_full[i], 1);
      mbarrier_init(&k_empty[i], kWarps);
    }
    mbarrier_init(&v_full, 1);
    mbarrier_init(&v_empty, kWarps);
  }
};

struct DkvShared {
  static constexpr bool dkv = true;
  static constexpr int dim = kDim, boxes = kHeadBoxes, warps = kWarps, threads = 128 + warps * 32;
  static constexpr int rows = 64, producer_registers = 40, consumer_registers = 232;
  __nv_bfloat16 resident[2][rows * kDim];        // K, V
  __nv_bfloat16 streamed[2][2][kBlockElements];  // Q, dO
  float4 probability[2][kBlock / 8][128];  // per block: from a thread of the dV warpgroup to one of the dK warpgroup
  alignas(128) float statistics[2][2][kBlock];  // shift and delta of streamed queries
  Tile tile[2];
  uint64_t tile_ready, tile_full, tile_empty, full[2], empty[2], probability_full[2], probability_empty[2];
  uint64_t patch_full;

  __device__ void init() {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&empty[i], kWarps);
      mbarrier_init(&probability_full[i], kWarps / 2);
      mbarrier_init(&probability_empty[i], kWarps / 2);
    }
  }
};

// Recomputed by producer warps: registers are scarce.
__device__ __forceinline__ bool is_leader() { return read_tid_x() % 32 == 0; }

__device__ __forceinline__ void load_block(__nv_bfloat16* dst, const CUtensorMap* map, int head, int row,
                                           uint64_t* full) {
#pragma unroll
  for (int h = 0; h < kHeadBoxes; ++h)
    tma_load(dst + h * kBlock * kBoxColumns, map, h * kBoxColumns, head, row, 0, full);
}

// Zero the rows of blocks from `left` on, by one warp. Rows past the sequence's end may hold inf or NaN, which a factor
// of 0 does not cancel.
template <int kBlocks>
__device__ __forceinline__ void zero_rows(__nv_bfloat16* dst, int left) {
#pragma unroll 1
  for (int x = left * kBoxColumns + static_cast<int>(read_tid_x() % 32) * 8; x < kBlock * kBoxColumns; x += 32 * 8)
#pragma unroll
    for (int h = 0; h < kBlocks * kHeadBoxes; ++h)
      *reinterpret_cast<uint4*>(dst + h * kBlock * kBoxColumns + x) = make_uint4(0, 0, 0, 0);
  fence_proxy_async();
  __syncwarp();
}

// Producer warp of K and V for the dQ kernel.
__device__ __forceinline__ void load_blocks(DqShared& sh, const CUtensorMap* k, const CUtensorMap* v,
                                            const Problem& p) {
  unsigned block = 0, phases = 0;  // block: over all tiles; phases: bit 0 of tile_ready, bit 1 of patch_full
  for (;; phases ^= 1) {
    mbarrier_wait(&sh.tile_ready, phases & 1);
    Tile t = sh.tile[phases & 1];
    __syncwarp();
    if (t.s < 0) return;
    if (is_leader()) mbarrier_arrive(&sh.tile_empty);
    int group_size = p.heads;  // the asm keeps the division inside the loop: registers are scarce
    asm volatile("" : "+r"(group_size));
    int head = t.head / (group_size / p.kv_heads), end = min(t.q_len, t.first + DqShared::rows);
#pragma unroll 1
    for (int i = 0; i < end; i += kBlock, ++block) {
      auto load = [&](__nv_bfloat16* dst, const CUtensorMap* map, uint64_t* empty, unsigned uses, uint64_t* full) {
        bool complete = t.q_len - i >= kBlock;
        uint64_t* full_barrier = complete ? full : &sh.patch_full;
        mbarrier_wait(empty, uses % 2 ^ 1);
        if (is_leader()) {
          mbarrier_expect_tx(full_barrier, kBlockElements * 2);
          load_block(dst, map, head, t.q0 + i, full_barrier);
        }
        __syncwarp();
        if (!complete) {
          mbarrier_wait(full_barrier, phases >> 1);
          phases ^= 2;
          zero_rows<1>(dst, t.q_len - i);
          if (is_leader()) mbarrier_arrive(full);
        }
      };
      load(sh.k[block % 2], k, &sh.k_empty[block % 2], block / 2, &sh.k_full[block % 2]);
      load(sh.v, v, &sh.v_empty, block, &sh.v_full);
    }
  }
}

// Producer warp of Q, dO and their statistics for the dK/dV kernel.
__device__ __forceinline__ void load_blocks(DkvShared& sh, const CUtensorMap* q, const CUtensorMap* grad,
                                            const Problem& p) {
  unsigned block = 0, phases = 0;
  for (;; phases ^= 1) {
    mbarrier_wait(&sh.tile_ready, phases & 1);
    Tile t = sh.tile[phases & 1];
    __syncwarp();
    if (t.s < 0) return;
    if (is_leader()) mbarrier_arrive(&sh.tile_empty);
    int group = p.heads / p.kv_heads, head = t.head * group;
#pragma unroll 1
    for (int last = head + group; head < last; ++head) {
#pragma unroll 1
      for (int i = t.first; i < t.q_len; i += kBlock, ++block) {
        int left = t.q_len - i, stage = static_cast<int>(block % 2);
        uint64_t* full_barrier = left >= kBlock ? &sh.full[stage] : &sh.patch_full;
        mbarrier_wait(&sh.empty[stage], block / 2 % 2 ^ 1);
        if (is_leader()) {
          int64_t index = (int64_t{head} * p.pads + t.q0 / kStatisticsPad + t.s) * kStatisticsPad + i;
          mbarrier_expect_tx(full_barrier, 2 * kBlockElements * 2 + 2 * kBlock * 4);
          load_block(sh.streamed[stage][0], q, head, t.q0 + i, full_barrier);
          load_block(sh.streamed[stage][1], grad, head, t.q0 + i, full_barrier);
          tma_load_1d(sh.statistics[stage][0], p.shift + index, kBlock * 4, full_barrier);
          tma_load_1d(sh.statistics[stage][1], p.delta + index, kBlock * 4, full_barrier);
        }
        __syncwarp();
        if (left < kBlock) {
          mbarrier_wait(full_barrier, phases >> 1);
          phases ^= 2;
          zero_rows<2>(sh.streamed[stage][0], left);
          if (is_leader()) mbarrier_arrive(&sh.full[stage]);
        }
      }
    }
  }
}

// Issue d = a b^T over the head dimension; a's 64-column boxes are kRows rows apart.
template <int kRows>
__device__ __forceinline__ void start_head_gemm(float (&d)[32], uint64_t a, uint64_t b) {
  constexpr int part = kRows * kBoxColumns * 2 >> 4, block_part = kBlock * kBoxColumns * 2 >> 4;
  warpgroup_arrive();
#pragma unroll
  for (int j = 0; j < kDim / 16; ++j)
    wgmma<false, false>(d, a + j / 4 * part + j % 4 * kDescriptorStep<false>,
                        b + j / 4 * block_part + j % 4 * kDescriptorStep<false>, j > 0);
  warpgroup_commit();
}

// Issue d += a b, with `a` in registers and a block of 64 rows as b.
__device__ __forceinline__ void accumulate_rows(float (&d)[kAccCount], const uint32_t (&a)[4][4], uint64_t b) {
  warpgroup_arrive();
#pragma unroll
  for (int j = 0; j < 4; ++j) wgmma<false, true>(__nv_bfloat16(), d, a[j], b + j * kDescriptorStep<true>, true);
  warpgroup_commit();
}

// Set the accumulators to zero before any wgmma is in flight.
__device__ __forceinline__ void clear(float (&d)[kAccCount]) {
#pragma unroll
  for (int x = 0; x < kAccCount; ++x) d[x] = 0;
  warpgroup_fence_operand(d);
}

// Store a warpgroup's rows of d below `left` to `out`, whose rows are `stride` heads apart.
__device__ __forceinline__ void store_tile(const float (&d)[kAccCount], void* out, int64_t first, int stride,
                                           int left) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = thread_row() + 8 * h;
    store_row<kAccCount>(d, h, static_cast<__nv_bfloat16*>(out) + (first + int64_t{row} * stride) * kDim, row < left);
  }
}

// Consumer warpgroup of the dQ kernel: 64 queries of each tile.
__device__ __forceinline__ void compute_dq(DqShared& sh, const Problem& p) {
  constexpr int group_step = 64 * kBoxColumns * 2 >> 4, rows = DqShared::rows;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  bool leader = threadIdx.x % 32 == 0;
  constexpr int grad_offset = rows * kDim * 2 >> 4;  // from Q to dO
  uint64_t q0 = smem_descriptor<false>(sh.resident[0]) + group * group_step;
  uint64_t k0 = smem_descriptor<false>(sh.k[0]), k0_transposed = smem_descriptor<true>(sh.k[0]),
           v0 = smem_descriptor<false>(sh.v);
  float factor = p.factor, s[32], dp[32], dq[kAccCount];
  uint32_t ds[4][4];
  unsigned block = 0;  // over all tiles
  for (int tile_phase = 0;;) {
    mbarrier_wait(&sh.tile_full, tile_phase);
    const Tile& t = sh.tile[tile_phase];  // reread where needed: registers are scarce
    tile_phase ^= 1;
    if (t.s < 0) return;
    int begin = t.first + group * 64, n = begin < t.q_len ? begin / kBlock + 1 : 0;
    int tile_blocks = block_count(min(t.q_len, t.first + rows));
    float shift[2], delta[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int query = begin + thread_row() + 8 * h;
      int64_t index = (int64_t{t.head} * p.pads + t.q0 / kStatisticsPad + t.s) * kStatisticsPad + query;
      shift[h] = query < t.q_len ? p.shift[index] : 0.0f;
      delta[h] = query < t.q_len ? p.delta[index] : 0.0f;
    }
    auto wait_for_keys = [&] { mbarrier_wait(&sh.k_full[block % 2], block / 2 % 2); };
    auto wait_for_values = [&] { mbarrier_wait(&sh.v_full, block % 2); };
    auto release_keys = [&](unsigned block) {
      if (leader) mbarrier_arrive(&sh.k_empty[block % 2]);
    };
    auto release_values = [&] {
      if (leader) mbarrier_arrive(&sh.v_empty);
    };
    auto release_tile = [&] {
      if (leader) mbarrier_arrive(&sh.tile_empty);
    };
    auto start_next = [&] {  // issues S = Q K^T and dP = dO V^T
      wait_for_keys();
      start_head_gemm<rows>(s, opaque(q0), k0 + block % 2 * kBlockStep);
      wait_for_values();
      start_head_gemm<rows>(dp, opaque(q0) + grad_offset, v0);
    };
    clear(dq);
    if (n) {
      start_next();
#pragma unroll 1
      for (int i = 0;;) {
        warpgroup_wait<1>();
        warpgroup_fence_operand(s);
        if (i) release_keys(block - 1);
#pragma unroll
        for (int x = 0; x < 32; ++x) s[x] = exp2_approx(__fmaf_rn(s[x], factor, shift[x / 2 % 2]));
        if (i + 1 == n) {  // causal mask: keys after the query
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            int last = thread_row() + 8 * h - thread_column();
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
              for (int e = 0; e < 2; ++e)
                if (8 * j + e > last) s[4 * j + 2 * h + e] = 0;
          }
        }
        warpgroup_wait<0>();
        warpgroup_fence_operand(dp);
        release_values();
        if (i + 1 == n) release_tile();
#pragma unroll
        for (int x = 0; x < 32; ++x) s[x] = s[x] * (dp[x] - delta[x / 2 % 2]);
        pack_operand(s, ds);
        accumulate_rows(dq, ds, k0_transposed + block % 2 * kBlockStep);
        ++block;
        if (++i == n) break;
        start_next();
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(dq);
      release_keys(block - 1);
    } else {
      __syncwarp();
      release_tile();
    }
#pragma unroll 1
    for (int i = n; i < tile_blocks; ++i, ++block) {  // blocks that the other warpgroup attends to: release them unused
      wait_for_keys();
      __syncwarp();
      release_keys(block);
      wait_for_values();
      __syncwarp();
      release_values();
    }
#pragma unroll
    for (int x = 0; x < kAccCount; ++x) dq[x] = dq[x] * p.scale;
    store_tile(dq, p.dq, (int64_t{t.q0} + begin) * p.heads + t.head, p.heads, t.q_len - begin);
  }
}

// Consumer warpgroup of the dK/dV kernel, for a tile of 64 keys: computes the probabilities and dV, or, kDk, computes
// dP and dK.
template <bool kDk>
__device__ __forceinline__ void compute_dkv(DkvShared& sh, const Problem& p) {
  bool leader = threadIdx.x % 32 == 0;
  uint64_t resident_operand = smem_descriptor<false>(sh.resident[kDk]),
           streamed_operand = smem_descriptor<false>(sh.streamed[0][kDk]);
  uint64_t reduced_operand = smem_descriptor<true>(sh.streamed[0][!kDk]);
  float factor = p.factor, s[32], acc[kAccCount];  // s: S^T, in the dK warpgroup dP^T
  uint32_t a[4][4];
  unsigned block = 0;  // over all tiles
  for (int tile_phase = 0;;) {
    mbarrier_wait(&sh.tile_full, tile_phase);
    const Tile& t = sh.tile[tile_phase];
    tile_phase ^= 1;
    if (t.s < 0) return;
    int tile_blocks = block_count(t.q_len - t.first), n = p.heads / p.kv_heads * tile_blocks, diagonal = 0;
    auto release = [&](unsigned block) {
      if (leader) mbarrier_arrive(&sh.empty[block % 2]);
    };
    clear(acc);
#pragma unroll 1
    for (int i = 0; i < n; ++i, ++block) {
      int stage = static_cast<int>(block % 2), phase = static_cast<int>(block / 2 % 2);
      mbarrier_wait(&sh.full[stage], phase);
      start_head_gemm<kBlock>(s, resident_operand, streamed_operand + stage * 2 * kBlockStep);
      warpgroup_wait<1>();
      if (i) release(block - 1);
      warpgroup_wait<0>();
      warpgroup_fence_operand(s);
      warpgroup_fence_operand(acc);
      if (i + 1 == n && leader) mbarrier_arrive(&sh.tile_empty);
      const float* statistics = sh.statistics[stage][kDk] + thread_column();
      float4* exchange = &sh.probability[stage][0][read_tid_x() % 128];
      if constexpr (!kDk) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float2 pair = *reinterpret_cast<const float2*>(statistics + 8 * j);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            s[4 * j + 2 * h] = exp2_approx(__fmaf_rn(s[4 * j + 2 * h], factor, pair.x));
            s[4 * j + 2 * h + 1] = exp2_approx(__fmaf_rn(s[4 * j + 2 * h + 1], factor, pair.y));
          }
        }
        if (i == diagonal) {  // causal mask: queries before the key
          diagonal += tile_blocks;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            int first = thread_row() + 8 * h - thread_column();
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
              for (int e = 0; e < 2; ++e)
                if (8 * j + e < first) s[4 * j + 2 * h + e] = 0;
          }
        }
        mbarrier_wait(&sh.probability_empty[stage], phase ^ 1);
#pragma unroll
        for (int j = 0; j < 8; ++j) exchange[j * 128] = make_float4(s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]);
        __syncwarp();
        if (leader) mbarrier_arrive(&sh.probability_full[stage]);
      } else {
        mbarrier_wait(&sh.probability_full[stage], phase);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float2 pair = *reinterpret_cast<const float2*>(statistics + 8 * j);
          float4 probability = exchange[j * 128];
          s[4 * j] = probability.x * (s[4 * j] - pair.x);
          s[4 * j + 1] = probability.y * (s[4 * j + 1] - pair.y);
          s[4 * j + 2] = probability.z * (s[4 * j + 2] - pair.x);
          s[4 * j + 3] = probability.w * (s[4 * j + 3] - pair.y);
        }
        __syncwarp();
        if (leader) mbarrier_arrive(&sh.probability_empty[stage]);
      }
      pack_operand(s, a);
      accumulate_rows(acc, a, reduced_operand + stage * 2 * kBlockStep);
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc);
    release(block - 1);
    if constexpr (kDk)
#pragma unroll
      for (int x = 0; x < kAccCount; ++x) acc[x] = acc[x] * p.scale;
    store_tile(acc, kDk ? p.dk : p.dv, (int64_t{t.q0} + t.first) * p.kv_heads + t.head, p.kv_heads, t.q_len - t.first);
  }
}

__device__ __forceinline__ void compute(DqShared& sh, const Problem& p) { compute_dq(sh, p); }

__device__ __forceinline__ void compute(DkvShared& sh, const Problem& p) {
  if (threadIdx.x / 128 == 1)
    compute_dkv<false>(sh, p);
  else
    compute_dkv<true>(sh, p);
}

}  // namespace
}  // namespace alignkit

// Run the backward pass for head dimension 256. Returns a cudaError_t.
extern "C" int alignkit_attention_backward_256(const AlignkitAttentionBackward* p, cudaStream_t stream) {
  if (p->dim != alignkit::kDim || p->tokens < 0 || p->tokens * int64_t{p->heads} >= 1 << 30 ||
      p->kv_heads < 1 || p->heads % p->kv_heads)
    return cudaErrorInvalidValue;
  return alignkit::launch_both<alignkit::DqShared, alignkit::DkvShared>(*p, stream);
}

ALIGNKIT_FUNCTION(alignkit_attention_backward_256)
