// Causal attention, backward, for packed sequences and head dimensions 64, 96 and 128: a dQ kernel, then a dK/dV
// kernel.
//
// Tile: 64 rows for each of two consumer warpgroups. The dQ kernel keeps Q and dO of a tile resident and streams K and
// V in ascending blocks of 64 keys. The dK/dV kernel keeps K and V resident and streams Q and dO in ascending blocks of
// 64 queries, one query head of the GQA group after another.
//
// Warp specialization: two producer warps issue TMA loads, one for the resident tiles (it also schedules them), one for
// the streamed blocks. Consumers recompute the probabilities from the scores and the saved statistic `shift`, and keep
// gradients in accumulators. A 64 x 64 accumulator tile, rounded to bf16, is the register A operand of the next wgmma,
// so probabilities never pass through shared memory. A warpgroup issues the next block's GEMMs before the last GEMM of
// a block is done; meanwhile the other warpgroup uses the tensor core.
//
// Order of summation (docs/contract.md, "On Hopper GPUs"): dQ is a chain over keys ascending, dK and dV are chains over
// queries ascending, head by head.
//
// Launch: each kernel has one persistent CTA of 384 threads per SM. The CTAs take the tiles in snake order, longest
// first. Sequence lengths are read on the device. Tiles, blocks and launch shape change no bits.
#include "backward.cuh"


namespace alignkit {
namespace {

// schedule: consumer warpgroups, pipeline stages, and registers per thread of producers and consumers.
template <int kDim, bool kDkv>
struct Plan;

template <>
struct Plan<128, false> {
  static constexpr int groups = 2, stages = 4, producer_registers = 24, consumer_registers = 240;
};

template <>
struct Plan<128, true> {
  static constexpr int groups = 2, stages = 4, producer_registers = 24, consumer_registers = 240;
};

template <bool kDkv>
struct Plan<96, kDkv> {
  static constexpr int groups = 2, stages = 4, producer_registers = 40, consumer_registers = 232;
};

template <bool kDkv>
struct Plan<64, kDkv> {
  static constexpr int groups = 2, stages = 8, producer_registers = 40, consumer_registers = 232;
};

// kDkv: the dK/dV kernel, with K and V resident, Q and dO streamed. Otherwise the dQ kernel, with Q and dO resident.
template <int kDim, bool kDkv>
struct Shared {
  using plan = Plan<kDim, kDkv>;
  static constexpr bool dkv = kDkv;
  static constexpr int groups = plan::groups, stages = plan::stages, rows = groups * 64, dim = kDim;
  static constexpr int producer_registers = plan::producer_registers, consumer_registers = plan::consumer_registers;
  static constexpr int warps = groups * 4;
  static constexpr int boxes = kBoxesPerHead<kDim>, width = boxes * kBoxColumns, threads = (groups + 1) * 128;
  __nv_bfloat16 resident[2][rows * width];
  __nv_bfloat16 streamed[stages][2][kBlock * width];
  alignas(128) float statistics[kDkv ? stages : 1][2][kBlock];  // shift and delta of streamed queries
  Tile tile[2];  // double-buffered: the scheduler writes one while consumers read the other
  uint64_t tile_ready, tile_full, tile_empty, full[stages], empty[stages];
  uint64_t patch_full;  // full barrier of a block whose rows past the sequence's end the producer zeroes first

  __device__ void init() {
    for (int i = 0; i < stages; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&empty[i], warps);
    }
  }
};

// Producer warp of the streamed blocks.
template <int kDim, bool kDkv>
__device__ __forceinline__ void load_blocks(Shared<kDim, kDkv>& sh, const CUtensorMap* a, const CUtensorMap* b,
                                            const Problem& p) {
  constexpr int stages = Shared<kDim, kDkv>::stages, boxes = Shared<kDim, kDkv>::boxes;
  constexpr int rows = Shared<kDim, kDkv>::rows;
  constexpr int bytes = 2 * kBlock * Shared<kDim, kDkv>::width * 2 + (kDkv ? 2 * kBlock * 4 : 0);
  auto lane = [] { return static_cast<int>(read_tid_x() % 32); };  // reread: registers are scarce
  static_assert((stages & stages - 1) == 0);
  unsigned block = 0, phases = 0;  // block: over all tiles; phases: bit 0 of tile_ready, bit 1 of patch_full
  for (;; phases ^= 1) {
    mbarrier_wait(&sh.tile_ready, phases & 1);
    Tile t = sh.tile[phases & 1];
    __syncwarp();
    if (t.s < 0) return;
    if (lane() == 0) mbarrier_arrive(&sh.tile_empty);  // tile read: the scheduler may publish the next one
    int begin = kDkv ? t.first : 0, end = kDkv ? t.q_len : min(t.q_len, t.first + rows);
    int group_size = p.heads;  // the asm keeps the division inside the loop: registers are scarce
    asm volatile("" : "+r"(group_size));
    group_size /= p.kv_heads;
    int head = kDkv ? t.head * group_size : t.head / group_size;
#pragma unroll 1
    for (int last = kDkv ? head + group_size : head + 1; head < last; ++head) {
#pragma unroll 1
      for (int i = begin; i < end; i += kBlock, ++block) {
        int left = t.q_len - i, stage = static_cast<int>(block % stages);
        uint64_t* full = left >= kBlock ? &sh.full[stage] : &sh.patch_full;
        mbarrier_wait(&sh.empty[stage], block / stages % 2 ^ 1);
        if (lane() == 0) {
          mbarrier_expect_tx(full, bytes);
#pragma unroll
          for (int h = 0; h < boxes; ++h) {
            tma_load(sh.streamed[stage][0] + h * kBlock * kBoxColumns, a, h * kBoxColumns, head, t.q0 + i, 0, full);
            tma_load(sh.streamed[stage][1] + h * kBlock * kBoxColumns, b, h * kBoxColumns, head, t.q0 + i, 0, full);
          }
          if (kDkv) {
            int64_t index = (int64_t{head} * p.pads + t.q0 / kStatisticsPad + t.s) * kStatisticsPad + i;
            tma_load_1d(sh.statistics[stage][0], p.shift + index, kBlock * 4, full);
            tma_load_1d(sh.statistics[stage][1], p.delta + index, kBlock * 4, full);
          }
        }
        __syncwarp();
        if (left < kBlock) {  // rows past the sequence's end may hold inf or NaN, which a factor of 0 does not cancel
          mbarrier_wait(full, phases >> 1);
          phases ^= 2;
#pragma unroll 1
          for (int x = left * kBoxColumns + lane() * 8; x < kBlock * kBoxColumns; x += 32 * 8)
#pragma unroll
            for (int h = 0; h < 2 * boxes; ++h)
              *reinterpret_cast<uint4*>(sh.streamed[stage][0] + h * kBlock * kBoxColumns + x) = make_uint4(0, 0, 0, 0);
          fence_proxy_async();
          __syncwarp();
          if (lane() == 0) mbarrier_arrive(&sh.full[stage]);
        }
      }
    }
  }
}

// Consumer warpgroup of the dQ kernel: 64 queries of each tile.
template <int kDim>
__device__ __forceinline__ void compute_dq(Shared<kDim, false>& sh, const Problem& p) {
  constexpr int stages = Shared<kDim, false>::stages, rows = Shared<kDim, false>::rows, acc_count = kDim / 2;
  constexpr int steps = kDim / 16, box_step = kBlock * kBoxColumns * 2 >> 4, width = kBoxesPerHead<kDim> * kBoxColumns;
  constexpr int v_offset = kBlock * width * 2 >> 4;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  bool leader = threadIdx.x % 32 == 0;
  uint64_t k0 = smem_descriptor<false>(sh.streamed[0][0]), k0_transposed = smem_descriptor<true>(sh.streamed[0][0]);
  float factor = p.factor, s[32], dp[32], dq[acc_count];
  uint32_t q[steps][4], grad[steps][4], ds[4][4];
  int stage = 0, phase = 0, tile_phase = 0;
  for (;;) {
    mbarrier_wait(&sh.tile_full, tile_phase);
    const Tile& t = sh.tile[tile_phase];  // reread where needed: registers are scarce
    tile_phase ^= 1;
    if (t.s < 0) return;
    int lane = read_tid_x() % 32, matrix_row = group * 64 + read_tid_x() % 128 / 32 * 16 + lane % 16;
    // Swizzled address of the lane's row.
    uint32_t row = shared_address(sh.resident[0]) + matrix_row * kBoxColumns * 2 + (lane / 16 ^ matrix_row % 8) * 16;
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      uint32_t address = (row ^ i % 4 * 32) + i / 4 * rows * kBoxColumns * 2;
      ldmatrix_x4<false>(q[i], address);
      ldmatrix_x4<false>(grad[i], address + rows * width * 2);
    }
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
    int64_t out = (int64_t{t.q0} + begin) * p.heads + t.head;
    int valid_rows = t.q_len - begin;
    __syncwarp();
    if (leader) mbarrier_arrive(&sh.tile_empty);

    int offset = stage * 2 * v_offset;
    auto start_next = [&] {  // issues S = Q K^T and dP = dO V^T
      mbarrier_wait(&sh.full[stage], phase);
      offset = stage * 2 * v_offset;
      warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < steps; ++j)
        wgmma<false, false>(__nv_bfloat16(), s, q[j], k0 + offset + j / 4 * box_step + j % 4 * kDescriptorStep<false>,
                            j > 0);
      warpgroup_commit();
      warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < steps; ++j)
        wgmma<false, false>(__nv_bfloat16(), dp, grad[j],
                            k0 + offset + v_offset + j / 4 * box_step + j % 4 * kDescriptorStep<false>, j > 0);
      warpgroup_commit();
    };
    auto release = [&](int stage) {
      if (leader) mbarrier_arrive(&sh.empty[stage]);
    };
#pragma unroll
    for (int x = 0; x < acc_count; ++x) dq[x] = 0;
    warpgroup_fence_operand(dq);  // set to zero here, before any wgmma is in flight
    if (n) {
      int previous = -1;  // stage of the previous block
      start_next();
#pragma unroll 1
      for (int i = 0;;) {
        warpgroup_wait<1>();
        warpgroup_fence_operand(s);
        if (previous >= 0) release(previous);
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
#pragma unroll
        for (int x = 0; x < 32; ++x) s[x] = s[x] * (dp[x] - delta[x / 2 % 2]);
        pack_operand(s, ds);
        warpgroup_arrive();
#pragma unroll
        for (int j = 0; j < 4; ++j)
          wgmma<false, true>(__nv_bfloat16(), dq, ds[j], k0_transposed + offset + j * kDescriptorStep<true>, true);
        warpgroup_commit();
        previous = stage;
        advance<stages>(stage, phase);
        if (++i == n) break;
        start_next();
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(dq);
      release(previous);
    }
#pragma unroll 1
    for (int i = n; i < tile_blocks; ++i) {  // blocks that the other warpgroup attends to: release them unused
      mbarrier_wait(&sh.full[stage], phase);
      __syncwarp();
      release(stage);
      advance<stages>(stage, phase);
    }
#pragma unroll
    for (int x = 0; x < acc_count; ++x) dq[x] = dq[x] * p.scale;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = thread_row() + 8 * h;
      store_row<kDim / 2>(dq, h, static_cast<__nv_bfloat16*>(p.dq) + (out + int64_t{row} * p.heads) * kDim,
                          row < valid_rows);
    }
  }
}

// Consumer warpgroup of the dK/dV kernel: 64 keys of each tile.
template <int kDim>
__device__ __forceinline__ void compute_dkv(Shared<kDim, true>& sh, const Problem& p) {
  constexpr int stages = Shared<kDim, true>::stages, rows = Shared<kDim, true>::rows, acc_count = kDim / 2;
  constexpr int steps = kDim / 16, box_step = kBlock * kBoxColumns * 2 >> 4, width = kBoxesPerHead<kDim> * kBoxColumns;
  constexpr int grad_offset = kBlock * width * 2 >> 4;
  constexpr int resident_box_step = rows * kBoxColumns * 2 >> 4, v_offset = rows * width * 2 >> 4;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  bool leader = threadIdx.x % 32 == 0;
  uint64_t k0 = smem_descriptor<false>(sh.resident[0]) + group * (64 * kBoxColumns * 2 >> 4);
  uint64_t q0 = smem_descriptor<false>(sh.streamed[0][0]), q0_transposed = smem_descriptor<true>(sh.streamed[0][0]);
  float factor = p.factor, s[32], dp[32], dk[acc_count], dv[acc_count];
  uint32_t probability[4][4], ds[4][4];
  int stage = 0, phase = 0, tile_phase = 0;
  for (;;) {
    mbarrier_wait(&sh.tile_full, tile_phase);
    const Tile& t = sh.tile[tile_phase];
    tile_phase ^= 1;
    if (t.s < 0) return;
    int tile_blocks = block_count(t.q_len - t.first), group_size = p.heads / p.kv_heads;
    int valid_keys = t.q_len - t.first - group * 64;  // keys of this warpgroup in the sequence

    auto release = [&](int stage) {
      if (leader) mbarrier_arrive(&sh.empty[stage]);
    };
    auto skip = [&](int count) {  // releases blocks of queries before this warpgroup's keys
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        mbarrier_wait(&sh.full[stage], phase);
        __syncwarp();
        release(stage);
        advance<stages>(stage, phase);
      }
    };
    int offset = 0;
    auto start_next = [&] {  // issues S^T = K Q^T and dP^T = V dO^T
      mbarrier_wait(&sh.full[stage], phase);
      offset = stage * 2 * grad_offset;
      warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < steps; ++j)
        wgmma<false, false>(s, k0 + j / 4 * resident_box_step + j % 4 * kDescriptorStep<false>,
                            q0 + offset + j / 4 * box_step + j % 4 * kDescriptorStep<false>, j > 0);
      warpgroup_commit();
      warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < steps; ++j)
        wgmma<false, false>(dp, k0 + v_offset + j / 4 * resident_box_step + j % 4 * kDescriptorStep<false>,
                            q0 + offset + grad_offset + j / 4 * box_step + j % 4 * kDescriptorStep<false>, j > 0);
      warpgroup_commit();
    };
    if (valid_keys <= 0) {
      skip(group_size * tile_blocks);
      if (leader) mbarrier_arrive(&sh.tile_empty);
      continue;
    }
#pragma unroll
    for (int x = 0; x < acc_count; ++x) dk[x] = dv[x] = 0;
    warpgroup_fence_operand(dk);  // set to zero here, before any wgmma is in flight
    warpgroup_fence_operand(dv);
    int previous = -1, block = group, remaining = group_size * (tile_blocks - group);
    skip(group);
    start_next();
#pragma unroll 1
    for (;;) {
      warpgroup_wait<1>();
      warpgroup_fence_operand(s);
      if (previous >= 0) release(previous);
      const float* shift = sh.statistics[stage][0] + thread_column();
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float2 pair = *reinterpret_cast<const float2*>(shift + 8 * j);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          s[4 * j + 2 * h] = exp2_approx(__fmaf_rn(s[4 * j + 2 * h], factor, pair.x));
          s[4 * j + 2 * h + 1] = exp2_approx(__fmaf_rn(s[4 * j + 2 * h + 1], factor, pair.y));
        }
      }
      if (block == group) {  // causal mask: queries before the key
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
      pack_operand(s, probability);
      warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < 4; ++j)
        wgmma<false, true>(__nv_bfloat16(), dv, probability[j],
                           q0_transposed + offset + grad_offset + j * kDescriptorStep<true>, true);
      warpgroup_commit();
      warpgroup_wait<1>();
      warpgroup_fence_operand(dp);
      if (remaining == 1 && leader) mbarrier_arrive(&sh.tile_empty);
      const float* delta = sh.statistics[stage][1] + thread_column();
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float2 pair = *reinterpret_cast<const float2*>(delta + 8 * j);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          s[4 * j + 2 * h] = s[4 * j + 2 * h] * (dp[4 * j + 2 * h] - pair.x);
          s[4 * j + 2 * h + 1] = s[4 * j + 2 * h + 1] * (dp[4 * j + 2 * h + 1] - pair.y);
        }
      }
      pack_operand(s, ds);
      warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < 4; ++j)
        wgmma<false, true>(__nv_bfloat16(), dk, ds[j], q0_transposed + offset + j * kDescriptorStep<true>, true);
      warpgroup_commit();
      previous = stage;
      advance<stages>(stage, phase);
      warpgroup_wait<1>();
      if (--remaining == 0) break;
      if (++block == tile_blocks) {
        block = group;
        skip(group);
      }
      start_next();
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(dk);
    warpgroup_fence_operand(dv);
    release(previous);
#pragma unroll
    for (int x = 0; x < acc_count; ++x) dk[x] = dk[x] * p.scale;
    int64_t out = (int64_t{t.q0} + t.first + group * 64) * p.kv_heads + t.head;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = thread_row() + 8 * h;
      int64_t offset = (out + int64_t{row} * p.kv_heads) * kDim;
      store_row<kDim / 2>(dk, h, static_cast<__nv_bfloat16*>(p.dk) + offset, row < valid_keys);
      store_row<kDim / 2>(dv, h, static_cast<__nv_bfloat16*>(p.dv) + offset, row < valid_keys);
    }
  }
}

template <int kDim, bool kDkv>
__device__ __forceinline__ void compute(Shared<kDim, kDkv>& sh, const Problem& p) {
  if constexpr (kDkv)
    compute_dkv(sh, p);
  else
    compute_dq(sh, p);
}

template <int kDim>
cudaError_t launch_dim(const Problem& p, cudaStream_t stream) {
  return launch_both<Shared<kDim, false>, Shared<kDim, true>>(p, stream);
}

}  // namespace
}  // namespace alignkit

// Run the backward pass for head dimension 64, 96 or 128. Returns a cudaError_t.
extern "C" int alignkit_attention_backward(const AlignkitAttentionBackward* p, cudaStream_t stream) {
  if (p->tokens < 0 || p->tokens * int64_t{p->heads} >= 1 << 30 || p->kv_heads < 1 || p->heads % p->kv_heads)
    return cudaErrorInvalidValue;
  if (p->dim == 128) return alignkit::launch_dim<128>(*p, stream);
  if (p->dim == 96) return alignkit::launch_dim<96>(*p, stream);
  if (p->dim == 64) return alignkit::launch_dim<64>(*p, stream);
  return cudaErrorInvalidValue;
}

ALIGNKIT_FUNCTION(alignkit_attention_backward)
