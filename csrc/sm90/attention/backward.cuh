// Shared by backward.cu and backward_256.cu: arguments, tile scheduler, tile producer, fragment helpers, kernel frame
// and launch. Those two files hold the block producers and the arithmetic, and state the order of summation.
// Tile order, registers and launch shape change no bits.
#pragma once
#include <algorithm>

#include "../../interface.h"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/pdl.cuh"
#include "../ptx/exponential.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/pack.cuh"
#include "../ptx/thread.cuh"
#include "../ptx/wgmma.cuh"
#include "heads.cuh"

// Arguments, filled by alignkit/ops/attention/cuda_backend.py.
struct AlignkitAttentionBackward {
  AlignkitHeads q, k, v, grad;  // grad: gradient of the result
  const float *shift, *delta;   // per query, [heads, pads * 128]: see alignkit/ops/attention/gradients.py
  void *dq, *dk, *dv;           // [tokens, heads or kv_heads, dim]
  AlignkitInts starts;
  int tokens, sequences, heads, kv_heads, dim, pads;
  float factor, scale;  // scale * log2(e) for scores; scale for dQ and dK
};
ALIGNKIT_STRUCT(AlignkitAttentionBackward, q, k, v, grad, shift, delta, dq, dk, dv, starts, tokens, sequences, heads,
                kv_heads, dim, pads, factor, scale)

namespace alignkit {
namespace {

using Problem = AlignkitAttentionBackward;

constexpr int kBlock = 64;  // schedule: rows per streamed block; a fixed size of the kernels, see the assertion
static_assert(kBlock == 64, "pack_operand and the wgmmas of compute() process 64 x 64 score tiles");

struct Tile {
  int s;  // sequence; -1: no tile left
  int q0, q_len;
  int first;  // first row of the tile in its sequence
  int head;   // query head for dQ, KV head for dK/dV
};

// The tile scheduler of a CTA, run by one warp. `level` is a tile's length class: it grows with the number of blocks
// that the tile streams. Tiles are numbered class by class, the longest class first. The CTA takes one tile per wave of
// gridDim.x tiles, in snake order.
template <int kRows, bool kDkv>
struct TileScheduler {
  const Problem& p;
  int level, base = 0, wave = 0, tiles_before = 0;
  int q0, q_len, levels;  // for the lane's sequence

  __device__ TileScheduler(const Problem& p) : p(p) {
    int top = 0;
#pragma unroll 1
    for (; base < p.sequences; base += 32) {
      read();
      top = max(top, levels);
    }
    for (int distance = 16; distance; distance /= 2) top = max(top, __shfl_xor_sync(~0u, top, distance));
    level = top - 1;
    base = 0;
    read();
  }

  // Recomputed where needed: registers are scarce.
  __device__ int lane() const { return static_cast<int>(read_tid_x() % 32); }
  __device__ int heads() const { return kDkv ? p.kv_heads : p.heads; }

  // Load sequence base + lane.
  __device__ void read() {
    int s = base + lane();
    levels = 0;
    if (s >= p.sequences) return;
    sequence_rows(p.starts, s, p.tokens, q0, q_len);
    levels = (q_len + kRows - 1) / kRows;
  }

  __device__ Tile next() {
    int target = wave * gridDim.x + (wave % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    ++wave;
#pragma unroll 1
    while (level >= 0) {
      bool active = level < levels;
      unsigned active_lanes = __ballot_sync(~0u, active);
      int tiles_through = tiles_before + __popc(active_lanes) * heads();
      if (target < tiles_through) {
        int i = target - tiles_before, nth = i / heads();
        int source = __ffs(__ballot_sync(~0u, active && __popc(active_lanes & ((1u << lane()) - 1)) == nth)) - 1;
        Tile t;
        t.s = __shfl_sync(~0u, base + lane(), source);
        t.q0 = __shfl_sync(~0u, q0, source);
        t.q_len = __shfl_sync(~0u, q_len, source);
        t.first = __shfl_sync(~0u, kDkv ? levels - 1 - level : level, source) * kRows;
        t.head = i % heads();
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
    return {-1, 0, 0, 0, 0};
  }
};

// Tile scheduler and producer warp of the resident tensors; it loads the next tile once the consumers release this one.
template <class Shared>
__device__ __forceinline__ void load_tiles(Shared& sh, const CUtensorMap* a, const CUtensorMap* b, const Problem& p) {
  constexpr int rows = Shared::rows;
  TileScheduler<rows, Shared::dkv> scheduler(p);
  for (int slot = 0;; slot ^= 1) {
    Tile t = scheduler.next();
    mbarrier_wait(&sh.tile_empty, slot ^ 1);
    if (threadIdx.x % 32 == 0) {
      sh.tile[slot] = t;
      mbarrier_arrive(&sh.tile_ready);
      if (t.s < 0) {
        mbarrier_arrive(&sh.tile_full);
      } else {
        mbarrier_expect_tx(&sh.tile_full, sizeof(sh.resident));
#pragma unroll
        for (int h = 0; h < Shared::boxes; ++h) {
          tma_load(sh.resident[0] + h * rows * kBoxColumns, a, h * kBoxColumns, t.head, t.q0 + t.first, 0,
                   &sh.tile_full);
          tma_load(sh.resident[1] + h * rows * kBoxColumns, b, h * kBoxColumns, t.head, t.q0 + t.first, 0,
                   &sh.tile_full);
        }
      }
    }
    __syncwarp();
    if (t.s < 0) return;
  }
}

__device__ __forceinline__ int block_count(int rows) { return (rows + kBlock - 1) / kBlock; }

// The first of the thread's two rows in its warpgroup's 64; the second is 8 further.
__device__ __forceinline__ int thread_row() {
  uint32_t thread = read_tid_x();
  return static_cast<int>(thread % 128 / 32 * 16 + thread % 32 / 4);
}

// The first of the thread's two adjacent columns in each eight.
__device__ __forceinline__ int thread_column() { return static_cast<int>(read_tid_x() % 4 * 2); }

// Pack a 64 x 64 accumulator tile to bf16, the register A operand of the next wgmma.
__device__ __forceinline__ void pack_operand(const float (&x)[32], uint32_t (&operand)[4][4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) operand[j][i] = pack<__nv_bfloat16>(x[8 * j + 2 * i], x[8 * j + 2 * i + 1]);
}

__device__ __forceinline__ void fill_with_nan(void* out, int64_t vectors) {
  constexpr uint32_t nan = 0x7fc07fc0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < vectors; i += int64_t{gridDim.x} * blockDim.x)
    static_cast<uint4*>(out)[i] = make_uint4(nan, nan, nan, nan);
}

// The frame of both backward kernels. `a` and `b` are the resident tensors, `c` and `d` the streamed ones.
// `Shared` selects the kernel and sets rows per tile, head dimension, threads, consumer warps and registers.
// Inconsistent `starts` fill the results with NaN.
template <class Shared>
__global__ void __launch_bounds__(Shared::threads, 1)
    attention_backward(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                       const __grid_constant__ CUtensorMap c, const __grid_constant__ CUtensorMap d,
                       const __grid_constant__ Problem p) {
  // The declared alignment, which the swizzle needs, makes shared addresses compile-time constants.
  // tests/ops/test_attention_on_cpu.py replaces the next line by its text.
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& sh = *reinterpret_cast<Shared*>(raw);
  constexpr bool dkv = Shared::dkv;
  if (threadIdx.x == 0) {
    mbarrier_init(&sh.tile_ready, 1);
    mbarrier_init(&sh.tile_full, 1);
    mbarrier_init(&sh.tile_empty, Shared::warps + 1);
    mbarrier_init(&sh.patch_full, 1);
    sh.init();
    fence_mbarrier_init();
  }
  // PDL: dQ is launched first. Each dQ CTA waits for the kernels before dQ, then lets dK/dV start. So dK/dV starts with
  // complete inputs, and it reads nothing that dQ writes. It waits for dQ only at its end: when dK/dV is done, dQ is.
  if (!dkv) griddep_wait();
  griddep_launch_dependents();
  __syncthreads();
  if (load_int(p.starts, 0) != 0 || load_int(p.starts, p.sequences) != p.tokens) {
    int64_t vectors = int64_t{p.tokens} * Shared::dim / 8;
    if (dkv) {
      fill_with_nan(p.dk, vectors * p.kv_heads);
      fill_with_nan(p.dv, vectors * p.kv_heads);
      griddep_wait();
    } else {
      fill_with_nan(p.dq, vectors * p.heads);
    }
    return;
  }
  if (threadIdx.x / 128 == 0) {
    static_assert(kRegistersFit<Shared::producer_registers, Shared::consumer_registers, Shared::threads / 128 - 1>);
    setmaxnreg_dec<Shared::producer_registers>();
    if (threadIdx.x < 32)
      load_tiles(sh, &a, &b, p);
    else if (threadIdx.x < 64)
      load_blocks(sh, &c, &d, p);
    if (dkv) griddep_wait();
  } else {
    setmaxnreg_inc<Shared::consumer_registers>();
    compute(sh, p);
  }
}

// Host code.

template <class Shared>
cudaError_t launch(const Problem& p, int sms, cudaStream_t stream) {
  constexpr int bytes = sizeof(Shared), rows = Shared::rows;
  auto kernel = attention_backward<Shared>;
  int query_rows = Shared::dkv ? kBlock : rows, key_rows = Shared::dkv ? rows : kBlock;
  CUtensorMap q, grad, k, v;
  if (cudaError_t e = make_tensor_map(&q, p.q, p.tokens, p.heads, Shared::dim, 1, query_rows)) return e;
  if (cudaError_t e = make_tensor_map(&grad, p.grad, p.tokens, p.heads, Shared::dim, 1, query_rows)) return e;
  if (cudaError_t e = make_tensor_map(&k, p.k, p.tokens, p.kv_heads, Shared::dim, 1, key_rows)) return e;
  if (cudaError_t e = make_tensor_map(&v, p.v, p.tokens, p.kv_heads, Shared::dim, 1, key_rows)) return e;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
  int64_t tiles = (int64_t{p.tokens} / rows + p.sequences) * (Shared::dkv ? p.kv_heads : p.heads);
  unsigned ctas = static_cast<unsigned>(std::max<int64_t>(std::min<int64_t>(tiles, sms), 1));
  return Shared::dkv ? launch_pdl(kernel, ctas, Shared::threads, bytes, stream, k, v, q, grad, p)
                     : launch_pdl(kernel, ctas, Shared::threads, bytes, stream, q, grad, k, v, p);
}

// Launch dQ, then dK/dV.
template <class Dq, class Dkv>
cudaError_t launch_both(const Problem& p, cudaStream_t stream) {
  int device, sms;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return e;
  if (cudaError_t e = launch<Dq>(p, sms, stream)) return e;
  return launch<Dkv>(p, sms, stream);
}

}  // namespace
}  // namespace alignkit
