// What the kernels of attention's gradients share: the problem, its tiles, where a thread's elements lie, and the frame of a kernel
// with its launch.
#pragma once
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

struct AlignkitAttentionBackward {
  AlignkitHeads q, k, v, grad;  // the latter of the result
  const float *shift, *delta;   // by query, [heads, pads * 128]: see alignkit/ops/attention/gradients.py
  void *dq, *dk, *dv;           // [tokens, heads or kv_heads, dim]
  AlignkitInts starts;
  int tokens, sequences, heads, kv_heads, dim, pads;
  float factor, scale;  // of scores for powers of 2, and of gradients
};

namespace alignkit {
namespace {

using Problem = AlignkitAttentionBackward;

constexpr int kBlock = 64;  // rows of a block

struct Tile {
  int s;  // the sequence; -1: there are no more tiles
  int q0, q_len;
  int first;  // position
  int head;   // of queries, or of keys
};

// The tiles of a block of threads, found by a whole warp. A tile's level tells how many blocks pass by it; tiles are
// counted level by level, the last one first.
template <int kRows, bool kByKey>
struct Walk {
  const Problem& p;
  int level, base = 0, turn = 0, before = 0;
  int q0, q_len, levels;  // of the lane's sequence

  __device__ Walk(const Problem& p) : p(p) {
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

  // Read again where they are needed: registers are short.
  __device__ int lane() const { return static_cast<int>(thread_again() % 32); }
  __device__ int slots() const { return kByKey ? p.kv_heads : p.heads; }

  // The sequence base + lane.
  __device__ void read() {
    int s = base + lane();
    levels = 0;
    if (s >= p.sequences) return;
    rows_of(p.starts, s, p.tokens, q0, q_len);
    levels = (q_len + kRows - 1) / kRows;
  }

  __device__ Tile next() {
    int target = turn * gridDim.x + (turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    ++turn;
#pragma unroll 1
    while (level >= 0) {
      bool here = level < levels;
      unsigned all = __ballot_sync(~0u, here);
      int behind = before + __popc(all) * slots();
      if (target < behind) {
        int i = target - before, wanted = i / slots();
        int from = __ffs(__ballot_sync(~0u, here && __popc(all & ((1u << lane()) - 1)) == wanted)) - 1;
        Tile t;
        t.s = __shfl_sync(~0u, base + lane(), from);
        t.q0 = __shfl_sync(~0u, q0, from);
        t.q_len = __shfl_sync(~0u, q_len, from);
        t.first = __shfl_sync(~0u, kByKey ? levels - 1 - level : level, from) * kRows;
        t.head = i % slots();
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
    return {-1, 0, 0, 0, 0};
  }
};

// The warp that finds the tiles and has them brought, one ahead of those who compute where their rows allow it.
template <class Shared>
__device__ __forceinline__ void bring_tiles(Shared& sh, const CUtensorMap* a, const CUtensorMap* b, const Problem& p) {
  constexpr int rows = Shared::rows;
  Walk<rows, Shared::by_key> walk(p);
  for (int turn = 0;; turn ^= 1) {
    Tile t = walk.next();
    barrier_wait(&sh.tile_empty, turn ^ 1);
    if (threadIdx.x % 32 == 0) {
      sh.tile[turn] = t;
      barrier_arrive(&sh.found);
      if (t.s < 0) {
        barrier_arrive(&sh.tile_full);
      } else {
        barrier_expect(&sh.tile_full, sizeof(sh.stays));
#pragma unroll
        for (int h = 0; h < Shared::halves; ++h) {
          copy_box(sh.stays[0] + h * rows * kHalf, a, h * kHalf, t.head, t.q0 + t.first, 0, &sh.tile_full);
          copy_box(sh.stays[1] + h * rows * kHalf, b, h * kHalf, t.head, t.q0 + t.first, 0, &sh.tile_full);
        }
      }
    }
    __syncwarp();
    if (t.s < 0) return;
  }
}

__device__ __forceinline__ int blocks(int rows) { return (rows + kBlock - 1) / kBlock; }

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

__device__ __forceinline__ void fill_with_nan(void* out, int64_t vectors) {
  constexpr uint32_t nan = 0x7fc07fc0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < vectors; i += int64_t{gridDim.x} * blockDim.x)
    static_cast<uint4*>(out)[i] = make_uint4(nan, nan, nan, nan);
}

// The first two tensors stay, the latter two pass. A kernel's `Shared` says whether it is by key,
// how many rows a tile has and how long a head is, how many threads there are, how many warps compute, and registers.
template <class Shared>
__global__ void __launch_bounds__(Shared::threads, 1)
    attention_backward(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                       const __grid_constant__ CUtensorMap c, const __grid_constant__ CUtensorMap d,
                       const __grid_constant__ Problem p) {
  extern __shared__ __align__(1024) uint8_t raw[];  // as swizzled rows are; so addresses are constants, not registers
  Shared& sh = *reinterpret_cast<Shared*>(raw);
  constexpr bool by_key = Shared::by_key;
  if (threadIdx.x == 0) {
    barrier_init(&sh.found, 1);
    barrier_init(&sh.tile_full, 1);
    barrier_init(&sh.tile_empty, Shared::warps + 1);
    barrier_init(&sh.on_its_way, 1);
    sh.init();
    barrier_init_done();
  }
  // By query comes first. By key needs nothing of it, so it begins where there is room, after all blocks by query have
  // seen the end of what both need; only its own end waits.
  if (!by_key) wait_for_kernel_before();
  let_next_kernel_begin();
  __syncthreads();
  if (at(p.starts, 0) != 0 || at(p.starts, p.sequences) != p.tokens) {
    int64_t vectors = int64_t{p.tokens} * Shared::dim / 8;
    if (by_key) {
      fill_with_nan(p.dk, vectors * p.kv_heads);
      fill_with_nan(p.dv, vectors * p.kv_heads);
      wait_for_kernel_before();
    } else {
      fill_with_nan(p.dq, vectors * p.heads);
    }
    return;
  }
  if (threadIdx.x / 128 == 0) {
    static_assert(kRegistersSuffice<Shared::few, Shared::many, Shared::threads / 128 - 1>);
    registers_down<Shared::few>();
    if (threadIdx.x < 32)
      bring_tiles(sh, &a, &b, p);
    else if (threadIdx.x < 64)
      bring_blocks(sh, &c, &d, p);
    if (by_key) wait_for_kernel_before();
  } else {
    registers_up<Shared::many>();
    compute(sh, p);
  }
}

// Host.

template <class Shared>
cudaError_t launch(const Problem& p, int processors, cudaStream_t stream) {
  constexpr int bytes = sizeof(Shared), rows = Shared::rows;
  auto kernel = attention_backward<Shared>;
  int query_rows = Shared::by_key ? kBlock : rows, key_rows = Shared::by_key ? rows : kBlock;
  CUtensorMap q, grad, k, v;
  if (cudaError_t e = map_of(&q, p.q, p.tokens, p.heads, Shared::dim, 1, query_rows)) return e;
  if (cudaError_t e = map_of(&grad, p.grad, p.tokens, p.heads, Shared::dim, 1, query_rows)) return e;
  if (cudaError_t e = map_of(&k, p.k, p.tokens, p.kv_heads, Shared::dim, 1, key_rows)) return e;
  if (cudaError_t e = map_of(&v, p.v, p.tokens, p.kv_heads, Shared::dim, 1, key_rows)) return e;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
  int64_t tiles = (int64_t{p.tokens} / rows + p.sequences) * (Shared::by_key ? p.kv_heads : p.heads);
  unsigned blocks = static_cast<unsigned>(std::max<int64_t>(std::min<int64_t>(tiles, processors), 1));
  return Shared::by_key ? launch_early(kernel, blocks, Shared::threads, bytes, stream, k, v, q, grad, p)
                        : launch_early(kernel, blocks, Shared::threads, bytes, stream, q, grad, k, v, p);
}

// By query, then by key.
template <class ByQuery, class ByKey>
cudaError_t launch_both(const Problem& p, cudaStream_t stream) {
  int device, processors;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return e;
  if (cudaError_t e = launch<ByQuery>(p, processors, stream)) return e;
  return launch<ByKey>(p, processors, stream);
}

}  // namespace
}  // namespace alignkit
