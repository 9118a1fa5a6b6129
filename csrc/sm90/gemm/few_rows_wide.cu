// out [m, n] = a [m, k] . b [n, k]^T in fp32 for at most 64 rows, the logits of decoding: as fast as b can be read.
//
// A block takes 128 of n at a time, which are rows to the tensor core; the rows of a are its columns. One warp copies operands
// to shared memory, far ahead; two groups of four warps multiply 64 of n each by all of a. One chain for each output.
#include "few_rows.cuh"

namespace alignkit {
namespace {

template <int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    few_gemm(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, int m, int n, int k, float* out,
             int64_t pitch) {
  using Sh = WideShared<kWidth>;
  extern __shared__ uint8_t raw[];
  Sh& sh = *reinterpret_cast<Sh*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Sh::kDepth; ++i) {
      barrier_init(&sh.full[i], 1);
      barrier_init(&sh.empty[i], 8);  // warps that multiply
    }
    barrier_init_done();
  }
  __syncthreads();
  wait_for_kernel_before();
  let_next_kernel_begin();
  int steps = (k + kStep - 1) / kStep, stage = 0, phase = 0;
  if (threadIdx.x / 128 == 2) {
    if (threadIdx.x != 2 * 128) return;
    for (int id = blockIdx.x * kIds; id < n; id += gridDim.x * kIds)
      for (int i = 0; i < steps; ++i, step<Sh::kDepth>(stage, phase)) {
        barrier_wait(&sh.empty[stage], phase ^ 1);
        barrier_expect(&sh.full[stage], sizeof(WideStage<kWidth>));
        copy_box(sh.stage[stage].b, &b, i * kStep, id, &sh.full[stage]);
        copy_box(sh.stage[stage].a, &a, i * kStep, 0, &sh.full[stage]);
      }
    return;
  }
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  float sums[kWidth / 2];
  for (int id = blockIdx.x * kIds; id < n; id += gridDim.x * kIds) {
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      barrier_wait(&sh.full[stage], phase);
      uint64_t of_b = operand<false>(sh.stage[stage].b + group * kGroupRows * kStep);
      uint64_t of_a = operand<false>(sh.stage[stage].a);
      products_begin();
#pragma unroll
      for (int j = 0; j < kStep / 16; ++j)
        multiply<false, false>(sums, of_b + j * kNext<false>, of_a + j * kNext<false>, i + j > 0);
      products_end();
      products_wait<0>();
      if (lane == 0) barrier_arrive(&sh.empty[stage], 0);
      step<Sh::kDepth>(stage, phase);
    }
    products_taken(sums);
    Place p(n, id + group * kGroupRows, 0);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      int h = i / 2 % 2, row = p.column + i / 4 * 8 + i % 2;
      if (row < m && p.here[h]) out[row * pitch + p.row + 8 * h] = sums[i];
    }
  }
}

template <int kWidth>
cudaError_t launch_few(const Matrix& a, const Matrix& b, int m, int n, int k, float* out, int64_t pitch,
                       cudaStream_t stream) {
  CUtensorMap maps[2];
  if (cudaError_t e = map_of(&maps[0], a, Layout::kPlain, m, k, kWidth)) return e;
  if (cudaError_t e = map_of(&maps[1], b, Layout::kPlain, n, k, kIds)) return e;
  constexpr auto kernel = few_gemm<kWidth>;
  constexpr int bytes = sizeof(WideShared<kWidth>) + 1024;
  int processors;
  if (cudaError_t e = prepare<kernel>(bytes, 1, &processors)) return e;
  int blocks = std::min((n + kIds - 1) / kIds, processors);
  return launch_early(kernel, blocks, kThreads, bytes, stream, maps[0], maps[1], m, n, k, out, pitch);
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// out [m, n], fp32, rows `out_pitch` elements apart; m at most 64. Returns a cudaError_t.
extern "C" int alignkit_few_product(const void* a, int64_t a_pitch, const void* b, int64_t b_pitch, float* out,
                                    int64_t out_pitch, int m, int n, int k, cudaStream_t stream) {
  Matrix left{a, a_pitch}, right{b, b_pitch};
  if (m <= 8) return launch_few<8>(left, right, m, n, k, out, out_pitch, stream);
  if (m <= 16) return launch_few<16>(left, right, m, n, k, out, out_pitch, stream);
  if (m <= 32) return launch_few<32>(left, right, m, n, k, out, out_pitch, stream);
  if (m <= 64) return launch_few<64>(left, right, m, n, k, out, out_pitch, stream);
  return cudaErrorInvalidValue;
}
