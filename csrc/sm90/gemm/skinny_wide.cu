// Skinny GEMM out [m, n] = a [m, k] . b [n, k]^T in fp32 for m <= 64 and large n: the logits of decoding, at the speed
// of reading b.
//
// - Tile: operands are swapped; a CTA computes 128 outputs (of n, wgmma's M) by all rows of a (wgmma's N).
// - Warp specialization: one thread of a producer warpgroup issues TMA loads into a deep pipeline, across tiles. Two
//   consumer warpgroups compute 64 outputs each.
// - Order of summation (docs/contract.md, "Linear"): each output is one chain over ascending k, in steps of 16.
// - Launch: one persistent CTA per SM, 384 threads; PDL.
//
// Called by alignkit/ops/linear/cuda_backend.py. Tile and launch shape change no bits.
#include "skinny.cuh"

namespace alignkit {
namespace {

// The kernel; kWidth: m rounded up to 8, 16, 32 or 64.
template <int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    skinny_gemm(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, int m, int n, int k,
                float* out, int64_t pitch) {
  using Sh = WideShared<kWidth>;
  extern __shared__ uint8_t raw[];
  Sh& sh = *reinterpret_cast<Sh*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Sh::kDepth; ++i) {
      mbarrier_init(&sh.full[i], 1);
      mbarrier_init(&sh.empty[i], 8);  // consumer warps
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  griddep_wait();
  griddep_launch_dependents();
  int steps = (k + kStep - 1) / kStep, stage = 0, phase = 0;
  if (threadIdx.x / 128 == 2) {
    if (threadIdx.x != 2 * 128) return;
    for (int output = blockIdx.x * kOutputs; output < n; output += gridDim.x * kOutputs)
      for (int i = 0; i < steps; ++i, advance<Sh::kDepth>(stage, phase)) {
        mbarrier_wait(&sh.empty[stage], phase ^ 1);
        mbarrier_expect_tx(&sh.full[stage], sizeof(WideStage<kWidth>));
        tma_load(sh.stage[stage].b, &b, i * kStep, output, &sh.full[stage]);
        tma_load(sh.stage[stage].a, &a, i * kStep, 0, &sh.full[stage]);
      }
    return;
  }
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  float sums[kWidth / 2];
  for (int output = blockIdx.x * kOutputs; output < n; output += gridDim.x * kOutputs) {
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      mbarrier_wait(&sh.full[stage], phase);
      uint64_t desc_b = smem_descriptor<false>(sh.stage[stage].b + group * kGroupRows * kStep);
      uint64_t desc_a = smem_descriptor<false>(sh.stage[stage].a);
      warpgroup_arrive();
#pragma unroll
      for (int j = 0; j < kStep / 16; ++j)
        wgmma<false, false>(sums, desc_b + j * kDescriptorStep<false>, desc_a + j * kDescriptorStep<false>, i + j > 0);
      warpgroup_commit();
      warpgroup_wait<0>();
      if (lane == 0) mbarrier_arrive(&sh.empty[stage], 0);
      advance<Sh::kDepth>(stage, phase);
    }
    warpgroup_fence_operand(sums);
    Coords p(n, output + group * kGroupRows, 0);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      int h = i / 2 % 2, row = p.column + i / 4 * 8 + i % 2;
      if (row < m && p.valid[h]) out[row * pitch + p.row + 8 * h] = sums[i];
    }
  }
}

template <int kWidth>
cudaError_t launch_skinny(const Matrix& a, const Matrix& b, int m, int n, int k, float* out, int64_t pitch,
                          cudaStream_t stream) {
  CUtensorMap maps[2];
  if (cudaError_t e = make_tensor_map(&maps[0], a, Layout::kPlain, m, k, kWidth)) return e;
  if (cudaError_t e = make_tensor_map(&maps[1], b, Layout::kPlain, n, k, kOutputs)) return e;
  constexpr auto kernel = skinny_gemm<kWidth>;
  constexpr int bytes = sizeof(WideShared<kWidth>) + 1024;
  int sms;
  if (cudaError_t e = prepare<kernel>(bytes, 1, &sms)) return e;
  int ctas = std::min((n + kOutputs - 1) / kOutputs, sms);
  return launch_pdl(kernel, ctas, kThreads, bytes, stream, maps[0], maps[1], m, n, k, out, pitch);
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// out [m, n] = a . b^T in fp32 with `out_pitch` elements between rows. Returns a cudaError_t: cudaErrorInvalidValue for
// m > 64.
extern "C" int alignkit_few_product(const void* a, int64_t a_pitch, const void* b, int64_t b_pitch, float* out,
                                    int64_t out_pitch, int m, int n, int k, cudaStream_t stream) {
  Matrix left{a, a_pitch}, right{b, b_pitch};
  if (m <= 8) return launch_skinny<8>(left, right, m, n, k, out, out_pitch, stream);
  if (m <= 16) return launch_skinny<16>(left, right, m, n, k, out, out_pitch, stream);
  if (m <= 32) return launch_skinny<32>(left, right, m, n, k, out, out_pitch, stream);
  if (m <= 64) return launch_skinny<64>(left, right, m, n, k, out, out_pitch, stream);
  return cudaErrorInvalidValue;
}

ALIGNKIT_FUNCTION(alignkit_few_product)
