// Gate and up of the rows that chose an expert, and silu(gate) * up from the registers of the product.
//
// A block takes 128 rows by 128 features: 256 columns, those of gate and those of up. A group of four warps gathers the rows
// into shared memory, and one of its threads has the copy engine bring the matrices; two groups multiply 64 rows each.
// Two blocks, a cluster, have the same features of other rows, if there are: then one brings gate's matrix for both, the other up's.
// Each output is one chain over ascending k.
#include "../ptx/exponential.cuh"
#include "experts.cuh"

namespace alignkit {
namespace {

constexpr int kFeatures = kColumns / 2;  // of a tile
constexpr int kLag = 2;  // copies that are on their way when one is waited for
using GatedTurns = Turns<2, 1>;
constexpr uint16_t kBoth = 3;  // blocks

struct GatedShared {
  Stage stage[kStages];
  Rows rows;
  uint64_t full[kStages], empty[kStages];
};

struct GateUp {
  const __nv_bfloat16* x;
  int64_t x_pitch;
  const int64_t* row;  // of x, a pair
  __nv_bfloat16 *h, *y;
  int features, k;
  Matrices weights;
  Experts experts;
};

__device__ __forceinline__ void gather(GatedShared& sh, const CUtensorMap* all, const GateUp& p) {
  constexpr int eighths = kStep / 8, at_once = 128 / eighths, each = kRows / at_once;  // rows of 8 vectors
  int thread = threadIdx.x - 2 * 128, lane = thread % 32, column = thread % eighths * 8, at = thread / eighths;
  // Rows of 128 bytes, whose vectors are swizzled.
  int to = at * kStep + (thread % eighths ^ at % 8) * 8;
  int stage = 0, phase = 0, pending = 0, announced = 0;
  auto announce = [&] {
    shared_written();
    __syncwarp();
    if (lane == 0) barrier_arrive(&sh.full[announced]);
    if (++announced == kStages) announced = 0;
  };
  GatedTurns::Tile t;
  for (GatedTurns turns(sh.rows, p.experts); turns.next(t);) {
    const __nv_bfloat16* from[each];
    int pairs = t.end - t.row;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      int r = at + i * at_once;
      from[i] = p.x + (r < pairs ? p.row[t.row + r] : 0) * p.x_pitch + column;
    }
    const CUtensorMap* map = p.weights.map(all, t.expert);
    int gate = p.weights.first_row(t.expert) + t.column * kFeatures;
#pragma unroll 1
    for (int k = 0; k < p.k; k += kStep, step<kStages>(stage, phase)) {
      barrier_wait(&sh.empty[stage], phase ^ 1);
      if (thread == 0) {
        barrier_expect(&sh.full[stage], sizeof(Stage::b));
        __nv_bfloat16 *of_gate = sh.stage[stage].b, *of_up = of_gate + kFeatures * kStep;
        if (t.flat || GatedTurns::kBlocks == 1) {
          copy_box(of_gate, map, k, gate, &sh.full[stage]);
          copy_box(of_up, map, k, gate + p.features, &sh.full[stage]);
        } else if (turns.rank == 0) {
          copy_box_to(kBoth, of_gate, map, k, gate, &sh.full[stage]);
        } else {
          copy_box_to(kBoth, of_up, map, k, gate + p.features, &sh.full[stage]);
        }
      }
#pragma unroll
      for (int i = 0; i < each; ++i)
        copy_vector(sh.stage[stage].a + to + i * at_once * kStep, from[i] + k,
                    at + i * at_once < pairs && k + column < p.k);
      copies_end();
      if (pending < kLag) {
        ++pending;
      } else {
        copies_wait<kLag>();
        announce();
      }
    }
  }
  copies_wait<0>();
  for (; pending; --pending) announce();
}

__device__ __forceinline__ float rounded(float v) { return __bfloat162float(__float2bfloat16_rn(v)); }

// gate becomes silu(gate) * up. A division that looks at its operands first is waited for by the next one. Of gates between
// 2^-60 and 60, or as much below 0, neither the quotient nor what leads to it leaves the range of fp32: the same steps as in
// __fdiv_rn round correctly, and those of all gates run side by side. The others are rare.
template <int kCount>
__device__ __forceinline__ void activate(float (&gate)[kCount], const float (&up)[kCount]) {
  constexpr uint32_t least = 0x21800000, most = 0x42700000;  // 2^-60, 60
  bool others = false;
  float y[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float x = gate[i], d = 1.0f + exponential(-x), r = reciprocal(d);
    r = __fmaf_rn(r, __fmaf_rn(-d, r, 1.0f), r);
    float q = __fmaf_rn(x, r, 0.0f);
    y[i] = __fmaf_rn(r, __fmaf_rn(-d, q, x), q);
    others |= (__float_as_uint(x) & 0x7fffffff) - least > most - least;
  }
  if (others) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) y[i] = __fdiv_rn(gate[i], 1.0f + exponential(-gate[i]));
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) gate[i] = y[i] * up[i];
}

__device__ __forceinline__ void multiply_gated(GatedShared& sh, const GateUp& p) {
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32, stage = 0, phase = 0;
  bool late = group == 1, first = true;
  uint64_t a0 = operand<false>(sh.stage[0].a + group * kGroupRows * kStep), b0 = operand<false>(sh.stage[0].b);
  int steps = (p.k + kStep - 1) / kStep;
  float sums[128];
  GatedTurns::Tile t;
  for (GatedTurns turns(sh.rows, p.experts); turns.next(t);) {
    if (first && late) named_barrier_sync(1, 256);
    int before = 0;
#pragma unroll 1
    for (int k = 0; k < steps; ++k) {
      barrier_wait(&sh.full[stage], phase);
      uint64_t a = a0 + stage * (kStageBytes >> 4), b = b0 + stage * (kStageBytes >> 4);
      products_begin();
#pragma unroll
      for (int j = 0; j < kStep / 16; ++j)
        multiply<false, false>(sums, a + j * kNext<false>, b + j * kNext<false>, k + j > 0);
      products_end();
      if (first && !late && k == min(kBehind, steps) - 1) named_barrier_arrive(1, 256);
      if (k > 0) {
        products_wait<1>();
        if (lane < GatedTurns::kBlocks) barrier_arrive(&sh.empty[before], lane);
      }
      before = stage;
      step<kStages>(stage, phase);
    }
    products_wait<0>();
    products_taken(sums);
    if (lane < GatedTurns::kBlocks) barrier_arrive(&sh.empty[before], lane);
    first = false;
    Place place(t.end, t.row + group * kGroupRows, 0);
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
      activate(gate, up);
      store_rows(gate, place, p.y, p.features, p.features, column);
    }
  }
}

__global__ void __cluster_dims__(GatedTurns::kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    gate_up(const __grid_constant__ CUtensorMap weights, const GateUp p) {
  extern __shared__ uint8_t raw[];
  // Arrivals: the copy engine's bytes, and warps that gather.
  GatedShared& sh = begin_block<GatedShared, 8, GatedTurns::kBlocks>(
      raw, p.experts, 1 + 4, [&](int rows) { return GatedTurns::of(rows, p.experts.across); });
  if (threadIdx.x / 128 == 2) {
    registers_down<56>();
    gather(sh, &weights, p);
  } else {
    registers_up<224>();
    multiply_gated(sh, p);
  }
  if (GatedTurns::kBlocks > 1) {
    __syncwarp();
    cluster_sync();  // nobody leaves while the other block may still write here
  }
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// y [pairs, features] = silu(gate) * up, and, unless it is null, h [pairs, 2 features] = gate | up: rows `row` of x [.., k] by the
// matrices [2 features, k] of their experts. Those lie behind each other from `weights` on, rows `pitch` elements apart; or
// `each` has their maps. Returns a cudaError_t.
extern "C" int alignkit_experts_gate_up(const void* x, int64_t x_pitch, const int64_t* row, const void* weights,
                                        int64_t pitch, const void* each, const int64_t* offsets, int experts, void* h,
                                        void* y, int pairs, int features, int k, cudaStream_t stream) {
  if (experts > kMostExperts) return cudaErrorInvalidValue;
  CUtensorMap map = {};
  if (!each)
    if (cudaError_t e = map_of(&map, {weights, pitch}, Layout::kPlain, int64_t{2} * experts * features, k, kFeatures)) return e;
  constexpr int bytes = sizeof(GatedShared) + 1024;
  int clusters;
  if (cudaError_t e = prepare<gate_up>(bytes, GatedTurns::kBlocks, &clusters)) return e;
  GateUp p = {static_cast<const __nv_bfloat16*>(x),
              x_pitch,
              row,
              static_cast<__nv_bfloat16*>(h),
              static_cast<__nv_bfloat16*>(y),
              features,
              k,
              {static_cast<const CUtensorMap*>(each), 2 * features},
              {offsets, experts, (features + kFeatures - 1) / kFeatures}};
  return launch_early(gate_up, blocks_of<GatedTurns>(pairs, p.experts, clusters), kThreads, bytes, stream, map, p);
}

// The map of a matrix [2 features, k], 128 bytes, for `each`.
extern "C" int alignkit_experts_gate_up_map(void* map, const void* matrix, int64_t pitch, int rows, int k) {
  return write_map(map, {matrix, pitch}, rows, k, kFeatures);
}
