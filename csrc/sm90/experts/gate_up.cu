// Grouped GEMM for the experts' gate and up projections with gathered tokens; the epilogue computes silu(gate) * up.
//
// Tile: 128 pairs by 128 features, that is 256 columns: 128 of gate and 128 of up.
//
// Warp specialization: a producer warpgroup gathers the tokens' rows with cp.async, and one of its threads loads the
// weights with TMA. Two consumer warpgroups multiply 64 rows each. The second starts a little later, so that one
// computes its epilogue while the other uses the tensor core.
//
// Order of summation (docs/contract.md, "Mixture of experts"): each output is one chain over ascending k.
//
// Launch: one persistent CTA of 384 threads per SM.
//
// Called by alignkit/ops/moe_experts/cuda_backend.py. Tile and launch shape change no bits.
#include "../ptx/exponential.cuh"
#include "experts.cuh"

namespace alignkit {
namespace {

constexpr int kFeatures = kColumns / 2;  // features per tile
constexpr int kLag = 2;                  // schedule: cp.async groups in flight when the producer waits for one

struct GatedShared {
  Stage stage[kStages];
  ExpertTable table;
  uint64_t full[kStages], empty[kStages];
};

struct GateUp {
  const __nv_bfloat16* x;
  int64_t x_pitch;
  const int64_t* row;  // row of x for each pair
  __nv_bfloat16 *h, *y;
  int features, k;
  Matrices weights;
  Experts experts;
};

// Producer warpgroup.
__device__ __forceinline__ void gather(GatedShared& sh, const CUtensorMap* stacked, const GateUp& p) {
  constexpr int vectors = kStep / 8;  // 16-byte vectors per row and stage
  constexpr int rows_at_once = 128 / vectors, per_thread = kRows / rows_at_once;
  int thread = threadIdx.x - 2 * 128, lane = thread % 32, column = thread % vectors * 8, thread_row = thread / vectors;
  // 128-byte rows, whose vectors are swizzled.
  int offset = thread_row * kStep + (thread % vectors ^ thread_row % 8) * 8;
  int stage = 0, phase = 0, pending = 0, signal_stage = 0;
  auto signal_full = [&] {
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&sh.full[signal_stage]);
    if (++signal_stage == kStages) signal_stage = 0;
  };
  Tile t;
  for (TileScheduler<> scheduler(sh.table, p.experts); scheduler.next(t);) {
    const __nv_bfloat16* src[per_thread];
    int pairs = t.end - t.row;
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
      int r = thread_row + i * rows_at_once;
      src[i] = p.x + (r < pairs ? p.row[t.row + r] : 0) * p.x_pitch + column;
    }
    const CUtensorMap* map = p.weights.map(stacked, t.expert);
    int gate = p.weights.first_row(t.expert) + t.column * kFeatures;
#pragma unroll 1
    for (int k = 0; k < p.k; k += kStep, advance<kStages>(stage, phase)) {
      mbarrier_wait(&sh.empty[stage], phase ^ 1);
      if (thread == 0) {
        mbarrier_expect_tx(&sh.full[stage], sizeof(Stage::b));
        tma_load(sh.stage[stage].b, map, k, gate, &sh.full[stage]);
        tma_load(sh.stage[stage].b + kFeatures * kStep, map, k, gate + p.features, &sh.full[stage]);
      }
#pragma unroll
      for (int i = 0; i < per_thread; ++i)
        cp_async_zfill(sh.stage[stage].a + offset + i * rows_at_once * kStep, src[i] + k,
                       thread_row + i * rows_at_once < pairs && k + column < p.k);
      cp_async_commit();
      if (pending < kLag) {
        ++pending;
      } else {
        cp_async_wait<kLag>();
        signal_full();
      }
    }
  }
  cp_async_wait<0>();
  for (; pending; --pending) signal_full();
}

__device__ __forceinline__ float rounded(float v) { return __bfloat162float(__float2bfloat16_rn(v)); }

// Consumer warpgroup: multiplies 64 pairs of each tile and computes silu(gate) * up from the accumulators.
__device__ __forceinline__ void compute_gated(GatedShared& sh, const GateUp& p) {
  Mainloop<false, false, 1, GatedShared> mainloop{sh};
  int steps = (p.k + kStep - 1) / kStep, stage = 0, phase = 0;
  bool first = true;
  float sums[128];
  Tile t;
  for (TileScheduler<> scheduler(sh.table, p.experts); scheduler.next(t);) {
    auto next = mainloop.run(sums, steps, stage, phase, first);
    stage = next.stage, phase = next.phase, first = false;
    Coords place(t.end, t.row + mainloop.group * kGroupRows, 0);
#pragma unroll
    for (int i = 0; i < 64; i += 16) {  // 32 features at a time
      float gate[16], up[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        gate[j] = rounded(sums[i + j]);
        up[j] = rounded(sums[64 + i + j]);
      }
      int column = t.column * kFeatures + 2 * i;
      if (p.h) {
        store_rows(gate, place, p.h, 2 * p.features, p.features, column);
        store_rows(up, place, p.h + p.features, 2 * p.features, p.features, column);
      }
#pragma unroll
      for (int j = 0; j < 16; ++j) gate[j] = __fdiv_rn(gate[j], 1.0f + exponential(-gate[j])) * up[j];
      store_rows(gate, place, p.y, p.features, p.features, column);
    }
  }
}

// The gate and up kernel; see the top of the file.
__global__ void __launch_bounds__(kThreads, 1) gate_up(const __grid_constant__ CUtensorMap weights, const GateUp p) {
  extern __shared__ uint8_t raw[];
  GatedShared& sh = prologue<GatedShared>(raw, p.experts, 1 + 4);  // arrivals: TMA, and four gathering warps
  if (threadIdx.x / 128 == 2) {
    setmaxnreg_dec<56>();
    gather(sh, &weights, p);
  } else {
    setmaxnreg_inc<224>();
    compute_gated(sh, p);
  }
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// Compute y [pairs, features] = silu(gate) * up and, unless h is null, h [pairs, 2 features] = gate | up.
// Pair i multiplies row row[i] of x [.., k] by its expert's matrix [2 features, k]. The matrices are stacked from
// `weights` on, with rows `pitch` elements apart. Otherwise `each` holds one map per expert
// (alignkit_experts_gate_up_map). `features` is a multiple of 8. Not checked here: rows of x start at multiples of 16
// bytes (`gated_rejects` in cuda_backend.py). Returns a cudaError_t.
extern "C" int alignkit_experts_gate_up(const void* x, int64_t x_pitch, const int64_t* row, const void* weights,
                                        int64_t pitch, const void* each, const int64_t* offsets, int experts, void* h,
                                        void* y, int pairs, int features, int k, cudaStream_t stream) {
  if (experts < 1 || experts > kMaxExperts || features < 1 || features % 8) return cudaErrorInvalidValue;
  CUtensorMap map = {};
  if (!each)
    if (cudaError_t e =
            make_tensor_map(&map, {weights, pitch}, Layout::kPlain, int64_t{2} * experts * features, k, kFeatures))
      return e;
  constexpr int bytes = sizeof(GatedShared) + 1024;
  int sms;
  if (cudaError_t e = prepare<gate_up>(bytes, 1, &sms)) return e;
  GateUp p = {static_cast<const __nv_bfloat16*>(x),
              x_pitch,
              row,
              static_cast<__nv_bfloat16*>(h),
              static_cast<__nv_bfloat16*>(y),
              features,
              k,
              {static_cast<const CUtensorMap*>(each), 2 * features},
              {offsets, experts, (features + kFeatures - 1) / kFeatures}};
  return launch_pdl(gate_up, grid_size(pairs, p.experts, sms), kThreads, bytes, stream, map, p);
}

// Write the 128-byte tensor map of a matrix [2 features, k] for `each`.
extern "C" int alignkit_experts_gate_up_map(void* map, const void* matrix, int64_t pitch, int rows, int k) {
  return write_tensor_map(map, {matrix, pitch}, rows, k, kFeatures);
}

ALIGNKIT_FUNCTION(alignkit_experts_gate_up)
ALIGNKIT_FUNCTION(alignkit_experts_gate_up_map)
