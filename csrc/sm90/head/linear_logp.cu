// The LM head fused with log-softmax: the GEMM hidden . weight^T with an epilogue on its accumulators. The forward
// epilogue computes the contract's statistics of each tile of 128 ids. The backward epilogue computes the gradient of
// the logits. The forward pass stores the GEMM's output only if `products` is given.
//
// - Tile, warp specialization, launch shape: gemm/gemm.cuh; rows are tokens, columns are vocabulary ids.
// - Order of summation (docs/contract.md, "Log-softmax over the vocabulary"): each logit is one chain over k. The
//   statistics are a maximum and integer sums, so their order does not matter.
// - The formulas of `logit`, `Statistics` and `Gradient`, and kTile, are that section's. Changing one changes bits and
//   the contract id.
//
// AlignkitHead holds the arguments, which alignkit/ops/linear_logp/cuda_backend.py fills.
// alignkit_cuda_error, at the end, returns the text of a CUDA error for all kernels; it may move to any file.
#include <cmath>
#include <type_traits>

#include "../../interface.h"
#include "../gemm/gemm.cuh"
#include "../ptx/exponential.cuh"

namespace alignkit {
namespace {

constexpr int kTile = 128;        // mirrors alignkit/contract/constants.py:VOCAB_TILE
constexpr int kOne = 0x3f800000;  // hardware: bits of 1.0f

// Maximum of a and b; NaN if either is NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// v in [0, 1] rounded to a multiple of 2^-23, as an integer plus kOne.
__device__ __forceinline__ uint32_t fixed_plus_one(float v) { return __float_as_uint(v + 1.0f); }

// logit = scale * cap * tanh((x + bias) / cap) / temperature for the GEMM's output x; absent parts are skipped. The
// epilogues' kPlain means that all are absent.
struct Transform {
  const float* bias;  // [ids] or null
  float cap, scale;
  bool capped, scaled;
  const float* temperature;  // [rows] or null

  bool none() const { return !bias && !capped && !scaled && !temperature; }
};

// Transform x to a logit; `capped` is the value after soft-capping.
__device__ __forceinline__ float logit(float x, const Transform& transform, float bias, float temperature,
                                       float& capped) {
  if (transform.bias) x = x + bias;
  if (transform.capped) {
    x = __fdiv_rn(x, transform.cap);
    if (fabsf(x) < 0x1p-126f) x = 0.0f;  // Triton's tanh flushes denormals: give the same bits
    x = tanhf(x) * transform.cap;
  }
  capped = x;
  if (transform.scaled) x = x * transform.scale;
  if (transform.temperature) x = __fdiv_rn(x, temperature);
  return x;
}

// Epilogue of the forward pass. Per row and tile, with e = exp(z - m): m = max z, q = sum of rint(2^23 e), and with
// kEntropy u = sum of rint(2^23 e (m - z)). Per row: the target's logit.
template <bool kEntropy, bool kPlain>
struct Statistics : FromZero {
  Transform transform;
  const int64_t* target;  // [rows] global ids, or null
  int64_t first;          // the global id of column 0
  float* m;               // [rows, tiles]
  int* q;                 // [rows, tiles]
  int* u;                 // [rows, tiles] or null
  int64_t pitch;          // elements between rows of m, q and u
  float* z_target;        // [rows], written by the shard that holds the target
  float* products;        // the GEMM's output [rows, products_pitch], or null
  int64_t products_pitch;  // a multiple of 4, at least ids

  __device__ __forceinline__ void run(const Shape& s, float (&z)[128], int group_row, int first_id, State) const {
    Coords p(s.m, group_row, first_id);
    if (!kPlain && products) {
      store_products<0>(s, z, p);
      store_products<1>(s, z, p);
    }
    if (!kPlain) {
      float t[2] = {1.0f, 1.0f};
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (transform.temperature && p.valid[h]) t[h] = transform.temperature[p.row + 8 * h];
#pragma unroll
      for (int i = 0; i < 128; ++i) {
        int id = p.column + i / 4 * 8 + i % 2;
        float bias = transform.bias && id < s.n ? transform.bias[id] : 0.0f, capped;
        z[i] = logit(z[i], transform, bias, t[i / 2 % 2], capped);
      }
    }
    if (first_id + kColumns > s.n) {
#pragma unroll
      for (int i = 0; i < 128; ++i)
        if (p.column + i / 4 * 8 + i % 2 >= s.n) z[i] = -INFINITY;
    }
    if (target) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int64_t column = (p.valid[h] ? target[p.row + 8 * h] : -1) - first - first_id;
        bool owned = column >= 0 && column < kColumns && first_id + column < s.n && (column % 8) / 2 == p.lane % 4;
        if (!__any_sync(~0u, owned)) continue;
        int index = owned ? static_cast<int>(column / 8) * 4 + static_cast<int>(column % 2) + 2 * h : -1;
        float value = 0.0f;
#pragma unroll
        for (int i = 0; i < 128; ++i) value = i == index ? z[i] : value;
        if (owned) z_target[p.row + 8 * h] = value;
      }
    }
#pragma unroll
    for (int tile = 0; tile < kColumns / kTile; ++tile) {
      // Interleaved with the arithmetic, to hide the stores.
      if (kPlain && products && tile == 0) store_products<0>(s, z, p);
      if (kPlain && products && tile == 1) store_products<1>(s, z, p);
      float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < 64; ++i) top[i / 2 % 2] = max_nan(top[i / 2 % 2], z[64 * tile + i]);
      bool finite[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[h] = max_nan(top[h], __shfl_xor_sync(~0u, top[h], 1));
        top[h] = max_nan(top[h], __shfl_xor_sync(~0u, top[h], 2));
        finite[h] = top[h] > -INFINITY && top[h] < INFINITY;
      }
      uint32_t sum[2] = {0, 0}, weighted[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        int h = i / 2 % 2;
        float d = z[64 * tile + i] - top[h];
        if (kEntropy) d = fmaxf(d, -200.0f);  // e is 0 there; avoids 0 * inf = NaN
        float e = exponential(d);
        sum[h] += fixed_plus_one(e);
        if (kEntropy) weighted[h] += fixed_plus_one(e * -d);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[h] = quad_sum(finite[h] ? sum[h] - 32u * kOne : 0u);
        if (kEntropy) weighted[h] = quad_sum(finite[h] ? weighted[h] - 32u * kOne : 0u);
      }
      store_statistics(s, p, first_id, tile, p.lane % 2 ? top[1] : top[0], p.lane % 2 ? sum[1] : sum[0],
                       p.lane % 2 ? weighted[1] : weighted[0]);
    }
  }

  // Write the statistics of an empty tile, for rows that are not valid.
  __device__ __forceinline__ void skip(const Shape& s, int group_row, int first_id) const {
    Coords p(s.m, group_row, first_id);
    for (int tile = 0; tile < kColumns / kTile; ++tile) store_statistics(s, p, first_id, tile, -INFINITY, 0, 0);
  }

  // Store a tile's statistics. Four lanes share two rows: even lanes store the first row's, odd lanes the second's.
  __device__ __forceinline__ void store_statistics(const Shape& s, const Coords& p, int first_id, int tile, float top,
                                                   uint32_t sum, uint32_t weighted) const {
    int h = p.lane % 2;
    if (!(h ? p.valid[1] : p.valid[0]) || first_id + tile * kTile >= s.n) return;
    int64_t index = (p.row + 8 * h) * pitch + first_id / kTile + tile;
    if (p.lane % 4 < 2) {
      m[index] = top;
      q[index] = static_cast<int>(sum);
    } else if (kEntropy) {
      u[index] = static_cast<int>(weighted);
    }
  }

  // Store the GEMM's output for half kHalf of the columns.
  template <int kHalf>
  __device__ __forceinline__ void store_products(const Shape& s, const float (&z)[128], const Coords& p) const {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      if (i % 16 / 8 != kHalf) continue;
      float4 quad = quad_of(z, p, i);
      int id = p.quad + i % 16 * 16;
      float* dst = products + (p.row + i / 16 * 8) * products_pitch + id;
      if (p.valid[i / 16] && id + 3 < s.n) {
        *reinterpret_cast<float4*>(dst) = quad;
      } else if (p.valid[i / 16] && id < s.n) {
        dst[0] = quad.x;
        if (id + 1 < s.n) dst[1] = quad.y;
        if (id + 2 < s.n) dst[2] = quad.z;
      }
    }
  }

  // Sum v over the four lanes that share rows.
  static __device__ __forceinline__ uint32_t quad_sum(uint32_t v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
  }
};

// Epilogue of the backward pass: the gradient of the GEMM's output, in bf16, from the gradients of logp and, with
// kEntropy, of the entropy.
template <bool kEntropy, bool kPlain>
struct Gradient : FromZero {
  Transform transform;
  const int64_t* target;                            // [rows] global ids
  int64_t first;                                    // the global id of column 0
  const float *lse, *entropy, *g_logp, *g_entropy;  // [rows]; entropy and g_entropy may be null
  __nv_bfloat16* dz;                                // [rows, width]
  int64_t width;                                    // a multiple of 8, at least ids

  // Inputs of a thread's two rows, loaded before the mainloop and not converted, so that only run waits for them.
  struct State {
    int64_t target[2];
    float lse[2], g[2], entropy[2], g_entropy[2], temperature[2];
  };

  __device__ __forceinline__ State begin(const Shape& s, float (&)[128], int group_row, int first_id) const {
    Coords p(s.m, group_row, first_id);
    State state;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = min(p.row + 8 * h, s.m - 1);
      state.target[h] = target[row];
      state.lse[h] = lse[row];
      state.g[h] = g_logp[row];
      state.entropy[h] = kEntropy ? entropy[row] : 0.0f;
      state.g_entropy[h] = kEntropy ? g_entropy[row] : 0.0f;
      state.temperature[h] = !kPlain && transform.temperature ? transform.temperature[row] : 1.0f;
    }
    return state;
  }

  __device__ __forceinline__ void run(const Shape& s, float (&z)[128], int group_row, int first_id,
                                      const State& state) const {
    Coords p(s.m, group_row, first_id);
    int target_column[2];  // -1: the target is not in this shard; -2: the row is not valid or its target is negative
    bool owned = false, edge = first_id + kColumns > s.n;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int64_t id = p.valid[h] ? state.target[h] : -1;
      target_column[h] = id < 0 ? -2 : id >= first && id < first + s.n ? static_cast<int>(id - first) : -1;
      owned |= target_column[h] >= first_id && target_column[h] < first_id + kColumns;
      edge |= target_column[h] == -2;
    }
    owned = __any_sync(~0u, owned);
    edge = __any_sync(~0u, edge);
    if (!kPlain || owned || edge)
      differentiate<true>(s, z, p, state, target_column);
    else
      differentiate<false>(s, z, p, state, target_column);
    store_rows(z, p, dz, width, width, first_id);
  }

  // z <- the gradient. kSpecial: the warp's tile has a target, a row that is not valid or a column past the last id.
  template <bool kSpecial>
  __device__ __forceinline__ void differentiate(const Shape& s, float (&z)[128], const Coords& p, const State& state,
                                                const int (&target_column)[2]) const {
#pragma unroll
    for (int i = 0; i < 128; ++i) {
      int h = i / 2 % 2, id = p.column + i / 4 * 8 + i % 2;
      float capped;
      if (!kPlain) {
        float bias = transform.bias && id < s.n ? transform.bias[id] : 0.0f;
        z[i] = logit(z[i], transform, bias, state.temperature[h], capped);
      }
      float d = gradient(z[i] - state.lse[h], state.g[h], state.g_entropy[h], state.entropy[h]);
      if (kSpecial && id == target_column[h]) d = d + state.g[h];
      if (!kPlain && transform.temperature) d = __fdiv_rn(d, state.temperature[h]);
      if (!kPlain && transform.scaled) d = d * transform.scale;
      if (!kPlain && transform.capped) {
        float c = __fdiv_rn(capped, transform.cap);
        d = d * (1.0f - c * c);
      }
      z[i] = kSpecial && (target_column[h] == -2 || id >= s.n) ? 0.0f : d;
    }
  }

  // Gradient by the logit of an id other than the target, from the id's logprob.
  static __device__ __forceinline__ float gradient(float lp, float g, float g_entropy, float entropy) {
    float e = exponential(lp), d = -(g * e);
    if (kEntropy) d = e == 0.0f ? 0.0f : d - g_entropy * (e * (lp + entropy));
    return d;
  }

  // Store zeros for rows that are not valid.
  __device__ __forceinline__ void skip(const Shape& s, int group_row, int first_id) const {
    float zeros[128] = {};
    store_rows(zeros, Coords(s.m, group_row, first_id), dz, width, width, first_id);
  }
};

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// Arguments, filled by alignkit/ops/linear_logp/cuda_backend.py; see Count, Transform and the epilogues.
struct AlignkitHead {
  const void *hidden, *weight;  // bf16 [rows, k], [ids, k]
  int64_t hidden_pitch, weight_pitch;
  int rows, ids, k;
  const int* count;
  int before;
  const float* bias;
  const float* temperature;
  float cap, scale;
  int capped, scaled;
  const int64_t* target;
  int64_t first;
};
ALIGNKIT_STRUCT(AlignkitHead, hidden, weight, hidden_pitch, weight_pitch, rows, ids, k, count, before, bias,
                temperature, cap, scale, capped, scaled, target, first)

namespace {
Transform make_transform(const AlignkitHead& h) {
  return {h.bias, h.cap, h.scale, h.capped != 0, h.scaled != 0, h.temperature};
}

// Launch the head's GEMM with this epilogue.
template <class Epilogue>
cudaError_t launch_head(const AlignkitHead& h, const Epilogue& epilogue, cudaStream_t stream) {
  Shape s{h.rows, h.ids, h.k, {h.count, h.before}, {}};
  return launch<Layout::kPlain, Layout::kPlain>({h.hidden, h.hidden_pitch}, {h.weight, h.weight_pitch}, s, epilogue,
                                                stream);
}

// Call run(entropy, plain) with both as compile-time constants.
template <class Run>
cudaError_t dispatch(bool entropy, bool plain, const Run& run) {
  std::true_type yes;
  std::false_type no;
  return entropy ? (plain ? run(yes, yes) : run(yes, no)) : (plain ? run(no, yes) : run(no, no));
}
}  // namespace

// The functions below return a cudaError_t. They do not check pitches, widths and alignment; the functions *_rejects in
// alignkit/ops/linear_logp/cuda_backend.py do.

// Forward: m, q, u [rows, tiles] with `pitch` elements between rows; z_target [rows]. u, target and products may be
// null.
extern "C" int alignkit_head_statistics(const AlignkitHead* h, float* m, int* q, int* u, int64_t pitch, float* z_target,
                                        float* products, int64_t products_pitch, cudaStream_t stream) {
  Transform transform = make_transform(*h);
  return dispatch(u != nullptr, transform.none(), [&](auto entropy, auto plain) {
    Statistics<entropy, plain> e{{}, transform, h->target, h->first, m, q, u, pitch, z_target, products,
                                 products_pitch};
    return launch_head(*h, e, stream);
  });
}

// Backward: dz [rows, width] bf16 <- the gradient of the GEMM's output, zero in invalid rows and in columns past the
// last id. entropy and g_entropy may be null.
extern "C" int alignkit_head_gradient(const AlignkitHead* h, const float* lse, const float* entropy,
                                      const float* g_logp, const float* g_entropy, void* dz, int64_t width,
                                      cudaStream_t stream) {
  Transform transform = make_transform(*h);
  return dispatch(entropy != nullptr, transform.none(), [&](auto with_entropy, auto plain) {
    Gradient<with_entropy, plain> e{{},      transform, h->target, h->first, lse,
                                    entropy, g_logp,    g_entropy, static_cast<__nv_bfloat16*>(dz), width};
    return launch_head(*h, e, stream);
  });
}

// Return the message of a cudaError_t. alignkit/runtime/cuda.py calls it for the kernels of all files.
extern "C" const char* alignkit_cuda_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

ALIGNKIT_FUNCTION(alignkit_head_statistics)
ALIGNKIT_FUNCTION(alignkit_head_gradient)
ALIGNKIT_FUNCTION(alignkit_cuda_error)
