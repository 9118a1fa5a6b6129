// out [m, n] = a [m, k] . b [n, k]^T for at most 32 rows and few outputs, one chain each: the time is that of the chain,
// k / 16 dependent products. By mma.sync one follows another about twice as fast as by wgmma, with the same bits.
//
// A block takes 16 of n, which are rows to the tensor core, so that many multiprocessors read b. One warp copies operands to
// shared memory, far ahead; each other warp multiplies by eight rows of a, and has what it multiplies next in registers.
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma.cuh"
#include "gemm.cuh"

namespace alignkit {
namespace {

constexpr int kOutputs = 16;    // of n, of a block
constexpr int kBoxes = 4;       // of 64 of k, of a stage
constexpr int kHeld = 8;        // steps of 16 of k in registers
constexpr int kRowBytes = 128;  // of a box
constexpr int kGroup = 8;       // rows of a, of a warp

template <int kWarps>
struct NarrowStage {
  __nv_bfloat16 b[kBoxes][kOutputs * kStep];
  __nv_bfloat16 a[kBoxes][kWarps * kGroup * kStep];
};

template <int kWarps>
struct NarrowShared {
  static constexpr int kDepth = 192 * 1024 / sizeof(NarrowStage<kWarps>);
  NarrowStage<kWarps> stage[kDepth];
  uint64_t full[kDepth], empty[kDepth];
};

// What a lane has of kHeld steps: of 16 rows of b, and, for two steps at a time, of 8 rows of a.
struct Held {
  uint32_t b[kHeld][4], a[kHeld / 2][4];
};

// Where a lane's rows of a box begin, and by which bits the copy engine swizzled them.
struct Rows {
  uint32_t b, a, swizzle, b_chunk, a_chunk;
};

__device__ __forceinline__ void take(Held& held, int j, const Rows& rows, uint32_t b, uint32_t a, uint32_t a_box) {
  uint32_t chunk = j % 4 * 2, box = j / 4;
  uint32_t of_b = (chunk + rows.b_chunk) ^ rows.swizzle, of_a = (chunk + rows.a_chunk) ^ rows.swizzle;
  load_matrices<false>(held.b[j], b + box * (kOutputs * kRowBytes) + rows.b + (of_b << 4));
  if (j % 2 == 0) load_matrices<false>(held.a[j / 2], a + box * a_box + rows.a + (of_a << 4));
}

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
      barrier_init(&sh.full[i], 1);
      barrier_init(&sh.empty[i], kWarps);
    }
    barrier_init_done();
  }
  __syncthreads();
  wait_for_kernel_before();
  let_next_kernel_begin();
  constexpr int of_stage = kBoxes * kStep;
  int steps = (k + of_stage - 1) / of_stage, stage = 0, phase = 0, id = blockIdx.x * kOutputs;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == kWarps) {
    if (lane == 0)
      for (int i = 0; i < steps; ++i, step<Sh::kDepth>(stage, phase)) {
        barrier_wait(&sh.empty[stage], phase ^ 1);
        barrier_expect(&sh.full[stage], sizeof(Stage));
        for (int box = 0; box < kBoxes; ++box) {
          copy_box(sh.stage[stage].b[box], &b, i * of_stage + box * kStep, id, &sh.full[stage]);
          copy_box(sh.stage[stage].a[box], &a, i * of_stage + box * kStep, 0, &sh.full[stage]);
        }
      }
    return;
  }
  constexpr uint32_t b_half = kBoxes / 2 * kOutputs * kRowBytes, a_box = kWarps * kGroup * kRowBytes;
  constexpr uint32_t a_half = kBoxes / 2 * a_box;
  uint32_t swizzle = lane % 8;
  Rows rows{static_cast<uint32_t>(lane % 16 * kRowBytes), (warp * kGroup + swizzle) * kRowBytes, swizzle,
            static_cast<uint32_t>(lane / 16), static_cast<uint32_t>(lane / 8)};
  uint32_t first_b = shared_address(sh.stage[0].b), first_a = shared_address(sh.stage[0].a);
  uint32_t at_b = first_b, at_a = first_a;
  Held now, next;
  float sums[4] = {};
  barrier_wait(&sh.full[0], 0);
#pragma unroll
  for (int j = 0; j < kHeld; ++j) take(now, j, rows, at_b, at_a, a_box);
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      take(next, j, rows, at_b + b_half, at_a + a_half, a_box);
      multiply_16(sums, now.b[j], now.a[j / 2][j % 2 * 2], now.a[j / 2][j % 2 * 2 + 1]);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&sh.empty[stage]);
    step<Sh::kDepth>(stage, phase);
    at_b = first_b + stage * sizeof(Stage), at_a = first_a + stage * sizeof(Stage);
    if (i + 1 < steps) barrier_wait(&sh.full[stage], phase);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {  // behind the last stage: what lies there, for nothing
      take(now, j, rows, at_b, at_a, a_box);
      multiply_16(sums, next.b[j], next.a[j / 2][j % 2 * 2], next.a[j / 2][j % 2 * 2 + 1]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int column = id + lane / 4 + i / 2 * 8, row = warp * kGroup + lane % 4 * 2 + i % 2;
    if (row < m && column < n)
      out[row * pitch + column] = static_cast<Out>(bias ? sums[i] + __bfloat162float(bias[column]) : sums[i]);
  }
}

template <int kWarps, class Out>
cudaError_t launch_narrow(const Matrix& a, const Matrix& b, const __nv_bfloat16* bias, int m, int n, int k, Out* out,
                          int64_t pitch, cudaStream_t stream) {
  CUtensorMap maps[2];
  if (cudaError_t e = map_of(&maps[0], a, Layout::kPlain, m, k, kWarps * kGroup)) return e;
  if (cudaError_t e = map_of(&maps[1], b, Layout::kPlain, n, k, kOutputs)) return e;
  constexpr auto kernel = narrow_chains<kWarps, Out>;
  constexpr int bytes = sizeof(NarrowShared<kWarps>) + 1024;
  int held;
  if (cudaError_t e = prepare<kernel>(bytes, 1, &held)) return e;
  return launch_early(kernel, (n + kOutputs - 1) / kOutputs, 32 * (kWarps + 1), bytes, stream, maps[0], maps[1], bias, m, n, k,
                      out, pitch);
}

template <class Out>
cudaError_t launch_narrow(const Matrix& a, const Matrix& b, const __nv_bfloat16* bias, int m, int n, int k, Out* out,
                          int64_t pitch, cudaStream_t stream) {
  if (m <= 8) return launch_narrow<1>(a, b, bias, m, n, k, out, pitch, stream);
  if (m <= 16) return launch_narrow<2>(a, b, bias, m, n, k, out, pitch, stream);
  return launch_narrow<4>(a, b, bias, m, n, k, out, pitch, stream);
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// out [m, n], fp32 or bf16, rows `out_pitch` elements apart; m at most 32. bias [n], bf16, or null, is added to each row.
// Returns a cudaError_t.
extern "C" int alignkit_narrow_product(const void* a, int64_t a_pitch, const void* b, int64_t b_pitch, const void* bias,
                                       void* out, int64_t out_pitch, int out_bf16, int m, int n, int k,
                                       cudaStream_t stream) {
  Matrix left{a, a_pitch}, right{b, b_pitch};
  const __nv_bfloat16* added = static_cast<const __nv_bfloat16*>(bias);
  return out_bf16 ? launch_narrow(left, right, added, m, n, k, static_cast<__nv_bfloat16*>(out), out_pitch, stream)
                  : launch_narrow(left, right, added, m, n, k, static_cast<float*>(out), out_pitch, stream);
}
