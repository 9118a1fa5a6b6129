// Skinny GEMM out [m, n] = a [m, k] . b [n, k]^T for m <= 32 and small n. The latency of one chain, k / 16 dependent
// MMAs, sets the run time. mma.sync has about half of wgmma's latency, with the same bits.
//
// - Tile: operands are swapped; a CTA computes 16 outputs (of n, the M of mma.sync), so that many SMs read b.
// - Warp specialization: one producer warp issues TMA loads into a deep pipeline. Each consumer warp multiplies by
//   eight rows of a, and loads the fragments of the next eight k16 steps with ldmatrix while it multiplies the current
//   ones.
// - Order of summation (docs/contract.md): each output is one chain over ascending k, in steps of 16; then the bias;
//   then one rounding.
// - Launch: one CTA per 16 outputs, with 1, 2 or 4 consumer warps for m <= 8, 16 or 32; PDL.
//
// Called by alignkit/ops/linear/cuda_backend.py. Tile and launch shape change no bits.
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma.cuh"
#include "gemm.cuh"

namespace alignkit {
namespace {

constexpr int kOutputs = 16;    // hardware: outputs (of n) per CTA, the M of mma.sync
constexpr int kBoxes = 4;       // schedule: TMA boxes of 64 of k per stage
constexpr int kFragments = 8;   // schedule: k16 steps per set of fragments in registers
constexpr int kRowBytes = 128;  // hardware: bytes per row of a swizzled box
constexpr int kWarpRows = 8;    // hardware: rows of a per warp, the N of mma.sync

template <int kWarps>
struct NarrowStage {
  __nv_bfloat16 b[kBoxes][kOutputs * kStep];
  __nv_bfloat16 a[kBoxes][kWarps * kWarpRows * kStep];
};

template <int kWarps>
struct NarrowShared {
  static constexpr int kDepth = 192 * 1024 / sizeof(NarrowStage<kWarps>);
  NarrowStage<kWarps> stage[kDepth];
  uint64_t full[kDepth], empty[kDepth];
};

// A lane's fragments of kFragments k16 steps: 16 rows of b, and 8 rows of a (two steps per ldmatrix).
struct Fragments {
  uint32_t b[kFragments][4], a[kFragments / 2][4];
};

// A lane's ldmatrix addresses: byte offsets of its rows in a box, their swizzle, and its 16-byte chunk in a k16 step.
struct Rows {
  uint32_t b, a, swizzle, b_chunk, a_chunk;
};

// Load the fragments of step j from the boxes at b and a.
__device__ __forceinline__ void load(Fragments& f, int j, const Rows& rows, uint32_t b, uint32_t a, uint32_t a_box) {
  uint32_t chunk = j % 4 * 2, box = j / 4;
  uint32_t chunk_b = (chunk + rows.b_chunk) ^ rows.swizzle, chunk_a = (chunk + rows.a_chunk) ^ rows.swizzle;
  ldmatrix_x4<false>(f.b[j], b + box * (kOutputs * kRowBytes) + rows.b + (chunk_b << 4));
  if (j % 2 == 0) ldmatrix_x4<false>(f.a[j / 2], a + box * a_box + rows.a + (chunk_a << 4));
}

// The kernel; kWarps: consumer warps.
template <int kWarps, class Out>
__global__ void __launch_bounds__(32 * (kWarps + 1), 1)
    narrow_chains(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                  const __nv_bfloat16* bias, int m, int n, int k, Out* out, int64_t pitch) {
  using Sh = NarrowShared<kWarps>;
  using Stage = NarrowStage<kWarps>;
  extern __shared__ uint8_t raw[];
  Sh& sh = *reinterpret_cast<Sh*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Sh::kDepth; ++i) {
      mbarrier_init(&sh.full[i], 1);
      mbarrier_init(&sh.empty[i], kWarps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  griddep_wait();
  griddep_launch_dependents();
  constexpr int stage_k = kBoxes * kStep;
  int steps = (k + stage_k - 1) / stage_k, stage = 0, phase = 0, output = blockIdx.x * kOutputs;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == kWarps) {
    if (lane == 0)
      for (int i = 0; i < steps; ++i, advance<Sh::kDepth>(stage, phase)) {
        mbarrier_wait(&sh.empty[stage], phase ^ 1);
        mbarrier_expect_tx(&sh.full[stage], sizeof(Stage));
        for (int box = 0; box < kBoxes; ++box) {
          tma_load(sh.stage[stage].b[box], &b, i * stage_k + box * kStep, output, &sh.full[stage]);
          tma_load(sh.stage[stage].a[box], &a, i * stage_k + box * kStep, 0, &sh.full[stage]);
        }
      }
    return;
  }
  constexpr uint32_t b_half = kBoxes / 2 * kOutputs * kRowBytes, a_box = kWarps * kWarpRows * kRowBytes;
  constexpr uint32_t a_half = kBoxes / 2 * a_box;
  uint32_t swizzle = lane % 8;
  Rows rows{static_cast<uint32_t>(lane % 16 * kRowBytes), (warp * kWarpRows + swizzle) * kRowBytes, swizzle,
            static_cast<uint32_t>(lane / 16), static_cast<uint32_t>(lane / 8)};
  uint32_t first_b = shared_address(sh.stage[0].b), first_a = shared_address(sh.stage[0].a);
  uint32_t at_b = first_b, at_a = first_a;
  Fragments current, next;
  float sums[4] = {};
  mbarrier_wait(&sh.full[0], 0);
#pragma unroll
  for (int j = 0; j < kFragments; ++j) load(current, j, rows, at_b, at_a, a_box);
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
      load(next, j, rows, at_b + b_half, at_a + a_half, a_box);
      mma_m16n8k16(sums, current.b[j], current.a[j / 2][j % 2 * 2], current.a[j / 2][j % 2 * 2 + 1]);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&sh.empty[stage]);
    advance<Sh::kDepth>(stage, phase);
    at_b = first_b + stage * sizeof(Stage), at_a = first_a + stage * sizeof(Stage);
    if (i + 1 < steps) mbarrier_wait(&sh.full[stage], phase);
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {  // after the last stage the loads are stale and unused
      load(current, j, rows, at_b, at_a, a_box);
      mma_m16n8k16(sums, next.b[j], next.a[j / 2][j % 2 * 2], next.a[j / 2][j % 2 * 2 + 1]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int column = output + lane / 4 + i / 2 * 8, row = warp * kWarpRows + lane % 4 * 2 + i % 2;
    if (row < m && column < n)
      out[row * pitch + column] = static_cast<Out>(bias ? sums[i] + __bfloat162float(bias[column]) : sums[i]);
  }
}

template <int kWarps, class Out>
cudaError_t launch_narrow(const Matrix& a, const Matrix& b, const __nv_bfloat16* bias, int m, int n, int k, Out* out,
                          int64_t pitch, cudaStream_t stream) {
  CUtensorMap maps[2];
  if (cudaError_t e = make_tensor_map(&maps[0], a, Layout::kPlain, m, k, kWarps * kWarpRows)) return e;
  if (cudaError_t e = make_tensor_map(&maps[1], b, Layout::kPlain, n, k, kOutputs)) return e;
  constexpr auto kernel = narrow_chains<kWarps, Out>;
  constexpr int bytes = sizeof(NarrowShared<kWarps>) + 1024;
  int sms;
  if (cudaError_t e = prepare<kernel>(bytes, 1, &sms)) return e;
  return launch_pdl(kernel, (n + kOutputs - 1) / kOutputs, 32 * (kWarps + 1), bytes, stream, maps[0], maps[1], bias, m,
                    n, k, out, pitch);
}

// Select the number of consumer warps by m.
template <class Out>
cudaError_t launch_narrow(const Matrix& a, const Matrix& b, const __nv_bfloat16* bias, int m, int n, int k, Out* out,
                          int64_t pitch, cudaStream_t stream) {
  if (m <= 8) return launch_narrow<1>(a, b, bias, m, n, k, out, pitch, stream);
  if (m <= 16) return launch_narrow<2>(a, b, bias, m, n, k, out, pitch, stream);
  if (m <= 32) return launch_narrow<4>(a, b, bias, m, n, k, out, pitch, stream);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// out [m, n] = a . b^T + bias; m <= 32. out is fp32 or bf16 with `out_pitch` elements between rows; bias [n] is bf16 or
// null. Returns a cudaError_t.
extern "C" int alignkit_narrow_product(const void* a, int64_t a_pitch, const void* b, int64_t b_pitch, const void* bias,
                                       void* out, int64_t out_pitch, int out_bf16, int m, int n, int k,
                                       cudaStream_t stream) {
  Matrix left{a, a_pitch}, right{b, b_pitch};
  const __nv_bfloat16* bias_bf16 = static_cast<const __nv_bfloat16*>(bias);
  return out_bf16 ? launch_narrow(left, right, bias_bf16, m, n, k, static_cast<__nv_bfloat16*>(out), out_pitch, stream)
                  : launch_narrow(left, right, bias_bf16, m, n, k, static_cast<float*>(out), out_pitch, stream);
}

ALIGNKIT_FUNCTION(alignkit_narrow_product)
