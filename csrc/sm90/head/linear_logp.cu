// The head: logits = hidden . weight^T, which never leave the chip. What becomes of them is computed from the registers of
// the product: the statistics of the contract, or the gradient of the logits.
#include <cmath>
#include <type_traits>

#include "../../interface.h"
#include "../gemm/gemm.cuh"
#include "../ptx/exponential.cuh"

namespace alignkit {
namespace {

constexpr int kTile = 128;  // ids of a tile of the contract
constexpr int kOne = 0x3f800000;  // 1.0f

__device__ __forceinline__ float larger(float a, float b) {  // NaN if one is
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// v in [0, 1] in multiples of 2^-23, plus kOne.
__device__ __forceinline__ uint32_t fixed_plus_one(float v) { return __float_as_uint(v + 1.0f); }

// From a product to a logit. kPlain: the product is the logit.
struct Transform {
  const float* bias;  // of the first id
  float cap, scale;
  bool capped, scaled;
  const float* temperature;  // a row; null: 1

  bool none() const { return !bias && !capped && !scaled && !temperature; }
};

__device__ __forceinline__ float logit(float x, const Transform& how, float bias, float temperature, float& capped) {
  if (how.bias) x = x + bias;
  if (how.capped) {
    x = __fdiv_rn(x, how.cap);
    if (fabsf(x) < 0x1p-126f) x = 0.0f;  // as it does in Triton, whose tanh flushes these
    x = tanhf(x) * how.cap;
  }
  capped = x;
  if (how.scaled) x = x * how.scale;
  if (how.temperature) x = __fdiv_rn(x, temperature);
  return x;
}

template <bool kEntropy, bool kPlain>
struct Statistics : FromZero {
  Transform how;
  const int64_t* target;  // a row, or null
  int64_t first;          // the global id of id 0
  float* m;
  int* q;
  int* u;        // or null
  int64_t pitch;  // elements of these from row to row; tiles are contiguous
  float* z_target;
  float* products;  // [rows, products_pitch], or null
  int64_t products_pitch;  // a multiple of 4, at least ids

  __device__ __forceinline__ void run(const Shape& s, float (&z)[128], int group_row, int first_id, State) const {
    Place p(s.m, group_row, first_id);
    if (!kPlain && products) {
      store_products<0>(s, z, p);
      store_products<1>(s, z, p);
    }
    if (!kPlain) {
      float t[2] = {1.0f, 1.0f};
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (how.temperature && p.here[h]) t[h] = how.temperature[p.row + 8 * h];
#pragma unroll
      for (int i = 0; i < 128; ++i) {
        int id = p.column + i / 4 * 8 + i % 2;
        float bias = how.bias && id < s.n ? how.bias[id] : 0.0f, capped;
        z[i] = logit(z[i], how, bias, t[i / 2 % 2], capped);
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
        int64_t at = (p.here[h] ? target[p.row + 8 * h] : -1) - first - first_id;
        bool mine = at >= 0 && at < kColumns && first_id + at < s.n && (at % 8) / 2 == p.lane % 4;
        if (!__any_sync(~0u, mine)) continue;
        int which = mine ? static_cast<int>(at / 8) * 4 + static_cast<int>(at % 2) + 2 * h : -1;
        float value = 0.0f;
#pragma unroll
        for (int i = 0; i < 128; ++i) value = i == which ? z[i] : value;
        if (mine) z_target[p.row + 8 * h] = value;
      }
    }
#pragma unroll
    for (int tile = 0; tile < kColumns / kTile; ++tile) {
      // Between what is computed, so that nothing waits for the stores.
      if (kPlain && products && tile == 0) store_products<0>(s, z, p);
      if (kPlain && products && tile == 1) store_products<1>(s, z, p);
      float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < 64; ++i) top[i / 2 % 2] = larger(top[i / 2 % 2], z[64 * tile + i]);
      bool finite[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[h] = larger(top[h], __shfl_xor_sync(~0u, top[h], 1));
        top[h] = larger(top[h], __shfl_xor_sync(~0u, top[h], 2));
        finite[h] = top[h] > -INFINITY && top[h] < INFINITY;
      }
      uint32_t sum[2] = {0, 0}, weighted[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        int h = i / 2 % 2;
        float d = z[64 * tile + i] - top[h];
        if (kEntropy) d = fmaxf(d, -200.0f);  // where e is 0, so that 0 times infinity is not NaN
        float e = exponential(d);
        sum[h] += fixed_plus_one(e);
        if (kEntropy) weighted[h] += fixed_plus_one(e * -d);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[h] = quad_sum(finite[h] ? sum[h] - 32u * kOne : 0u);
        if (kEntropy) weighted[h] = quad_sum(finite[h] ? weighted[h] - 32u * kOne : 0u);
      }
      put(s, p, first_id, tile, p.lane % 2 ? top[1] : top[0], p.lane % 2 ? sum[1] : sum[0],
          p.lane % 2 ? weighted[1] : weighted[0]);
    }
  }

  // Those of no ids, for rows that do not count.
  __device__ __forceinline__ void skip(const Shape& s, int group_row, int first_id) const {
    Place p(s.m, group_row, first_id);
    for (int tile = 0; tile < kColumns / kTile; ++tile) put(s, p, first_id, tile, -INFINITY, 0, 0);
  }

  // The statistics of a tile. Of four lanes with the same two rows, an even one writes the first row's, an odd one the other's.
  __device__ __forceinline__ void put(const Shape& s, const Place& p, int first_id, int tile, float top, uint32_t sum,
                                      uint32_t weighted) const {
    int h = p.lane % 2;
    if (!(h ? p.here[1] : p.here[0]) || first_id + tile * kTile >= s.n) return;
    int64_t to = (p.row + 8 * h) * pitch + first_id / kTile + tile;
    if (p.lane % 4 < 2) {
      m[to] = top;
      q[to] = static_cast<int>(sum);
    } else if (kEntropy) {
      u[to] = static_cast<int>(weighted);
    }
  }

  // Those of half kHalf of the columns.
  template <int kHalf>
  __device__ __forceinline__ void store_products(const Shape& s, const float (&z)[128], const Place& p) const {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      if (i % 16 / 8 != kHalf) continue;
      float4 quad = quad_of(z, p, i);
      int id = p.quad + i % 16 * 16;
      float* to = products + (p.row + i / 16 * 8) * products_pitch + id;
      if (p.here[i / 16] && id + 3 < s.n) {
        *reinterpret_cast<float4*>(to) = quad;
      } else if (p.here[i / 16] && id < s.n) {
        to[0] = quad.x;
        if (id + 1 < s.n) to[1] = quad.y;
        if (id + 2 < s.n) to[2] = quad.z;
      }
    }
  }

  static __device__ __forceinline__ uint32_t quad_sum(uint32_t v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
  }
};

template <bool kEntropy, bool kPlain>
struct Gradient : FromZero {
  Transform how;
  const int64_t* target;
  int64_t first;
  const float *lse, *entropy, *g_logp, *g_entropy;  // a row; entropy and g_entropy may be null
  __nv_bfloat16* dz;                                // [rows, width]
  int64_t width;                                    // a multiple of 8, at least ids

  // Of a thread's two rows, as it lies in memory, so that nothing waits for it before run.
  struct State {
    int64_t target[2];
    float lse[2], g[2], entropy[2], g_entropy[2], temperature[2];
  };

  __device__ __forceinline__ State begin(const Shape& s, float (&)[128], int group_row, int first_id) const {
    Place p(s.m, group_row, first_id);
    State of;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = min(p.row + 8 * h, s.m - 1);
      of.target[h] = target[row];
      of.lse[h] = lse[row];
      of.g[h] = g_logp[row];
      of.entropy[h] = kEntropy ? entropy[row] : 0.0f;
      of.g_entropy[h] = kEntropy ? g_entropy[row] : 0.0f;
      of.temperature[h] = !kPlain && how.temperature ? how.temperature[row] : 1.0f;
    }
    return of;
  }

  __device__ __forceinline__ void run(const Shape& s, float (&z)[128], int group_row, int first_id, const State& of) const {
    Place p(s.m, group_row, first_id);
    int at[2];  // the target's id here; -1: elsewhere; -2: the row does not count
    bool mine = false, edge = first_id + kColumns > s.n;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int64_t id = p.here[h] ? of.target[h] : -1;
      at[h] = id < 0 ? -2 : id >= first && id < first + s.n ? static_cast<int>(id - first) : -1;
      mine |= at[h] >= first_id && at[h] < first_id + kColumns;
      edge |= at[h] == -2;
    }
    mine = __any_sync(~0u, mine);
    edge = __any_sync(~0u, edge);
    if (!kPlain || mine || edge)
      by_products<true>(s, z, p, of, at);
    else
      by_products<false>(s, z, p, of, at);
    store_rows(z, p, dz, width, width, first_id);
  }

  // kSpecial: a target is here, or what does not count.
  template <bool kSpecial>
  __device__ __forceinline__ void by_products(const Shape& s, float (&z)[128], const Place& p, const State& of,
                                              const int (&at)[2]) const {
#pragma unroll
    for (int i = 0; i < 128; ++i) {
      int h = i / 2 % 2, id = p.column + i / 4 * 8 + i % 2;
      float capped;
      if (!kPlain) {
        float bias = how.bias && id < s.n ? how.bias[id] : 0.0f;
        z[i] = logit(z[i], how, bias, of.temperature[h], capped);
      }
      float d = gradient(z[i] - of.lse[h], of.g[h], of.g_entropy[h], of.entropy[h]);
      if (kSpecial && id == at[h]) d = d + of.g[h];
      if (!kPlain && how.temperature) d = __fdiv_rn(d, of.temperature[h]);
      if (!kPlain && how.scaled) d = d * how.scale;
      if (!kPlain && how.capped) {
        float c = __fdiv_rn(capped, how.cap);
        d = d * (1.0f - c * c);
      }
      z[i] = kSpecial && (at[h] == -2 || id >= s.n) ? 0.0f : d;
    }
  }

  // By the logit of an id that is not the target, from its logprob.
  static __device__ __forceinline__ float gradient(float lp, float g, float g_entropy, float entropy) {
    float e = exponential(lp), d = -(g * e);
    if (kEntropy) d = e == 0.0f ? 0.0f : d - g_entropy * (e * (lp + entropy));
    return d;
  }

  // Zeros for rows that do not count.
  __device__ __forceinline__ void skip(const Shape& s, int group_row, int first_id) const {
    float zeros[128] = {};
    store_rows(zeros, Place(s.m, group_row, first_id), dz, width, width, first_id);
  }
};

}  // namespace
}  // namespace alignkit

using namespace alignkit;

struct AlignkitHead {
  const void *hidden, *weight;
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
ALIGNKIT_LAYOUT(AlignkitHead, hidden, weight, hidden_pitch, weight_pitch, rows, ids, k, count, before, bias, temperature,
                cap, scale, capped, scaled, target, first)

namespace {
Transform transform_of(const AlignkitHead& h) {
  return {h.bias, h.cap, h.scale, h.capped != 0, h.scaled != 0, h.temperature};
}

template <class Epilogue>
cudaError_t launch_head(const AlignkitHead& h, const Epilogue& epilogue, cudaStream_t stream) {
  Shape s{h.rows, h.ids, h.k, {h.count, h.before}, {}};
  return launch<Layout::kPlain, Layout::kPlain>({h.hidden, h.hidden_pitch}, {h.weight, h.weight_pitch}, s, epilogue,
                                                stream);
}

// run(entropy, plain), with each a constant.
template <class Run>
cudaError_t of_kind(bool entropy, bool plain, const Run& run) {
  std::true_type yes;
  std::false_type no;
  return entropy ? (plain ? run(yes, yes) : run(yes, no)) : (plain ? run(no, yes) : run(no, no));
}
}  // namespace

// All return a cudaError_t.

extern "C" int alignkit_head_statistics(const AlignkitHead* h, float* m, int* q, int* u, int64_t pitch, float* z_target,
                                        float* products, int64_t products_pitch, cudaStream_t stream) {
  Transform how = transform_of(*h);
  return of_kind(u != nullptr, how.none(), [&](auto entropy, auto plain) {
    Statistics<entropy, plain> e{{}, how, h->target, h->first, m, q, u, pitch, z_target, products, products_pitch};
    return launch_head(*h, e, stream);
  });
}

extern "C" int alignkit_head_gradient(const AlignkitHead* h, const float* lse, const float* entropy,
                                      const float* g_logp, const float* g_entropy, void* dz, int64_t width,
                                      cudaStream_t stream) {
  Transform how = transform_of(*h);
  return of_kind(entropy != nullptr, how.none(), [&](auto with_entropy, auto plain) {
    Gradient<with_entropy, plain> e{{},      how,    h->target, h->first, lse,
                                    entropy, g_logp, g_entropy, static_cast<__nv_bfloat16*>(dz), width};
    return launch_head(*h, e, stream);
  });
}

extern "C" const char* alignkit_cuda_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
