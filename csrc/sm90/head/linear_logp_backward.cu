// The two GEMMs of the head's backward pass: dhidden = dz . weight and dweight = dz^T . hidden, over the valid rows.
// Only the device knows the number of valid rows.
//
// - Tile, warp specialization, launch shape: gemm/gemm.cuh; weight, dz^T and hidden are MN-major (kTransposed).
// - Order of summation (docs/contract.md, "Log-softmax over the vocabulary" and "On Hopper GPUs"): each output is one
//   chain, over ids for dhidden and over rows for dweight.
// - Start and end of a chain: it starts from zero or from the output. The result is stored in fp32, rounded to bf16, or
//   added in fp32 to the output. alignkit/ops/linear_logp/cuda_backend.py chooses as the contract prescribes; another
//   choice has other bits.
// - Overlap: dweight starts on clusters that are idle in dhidden's last wave (Order::kOverlap).
#include "../../interface.h"
#include "../gemm/gemm.cuh"

namespace alignkit {
namespace {

// An fp32 output [m, n] with `pitch` elements between rows; n and pitch are multiples of 4.
struct Out {
  float* data;
  int64_t pitch;

  // Quad i (see quad_of) is inside the matrix.
  __device__ __forceinline__ bool valid(const Shape& s, const Coords& p, int i) const {
    return p.valid[i / 16] && p.quad + i % 16 * 16 < s.n;
  }

  // The location of quad i.
  __device__ __forceinline__ float4& at(const Coords& p, int i) const {
    return *reinterpret_cast<float4*>(data + (p.row + i / 16 * 8) * pitch + p.quad + i % 16 * 16);
  }

  // Prefetch a CTA's tile to L2.
  __device__ __forceinline__ void prefetch(const Shape& s, int row, int first_column) const {
    const float* src = data + row * pitch + first_column;
    int bytes = min(s.n - first_column, kColumns) * static_cast<int>(sizeof(float));
#pragma unroll 1
    for (int i = min(s.m - row, kRows); i > 0; --i, src += pitch) alignkit::prefetch(src, bytes);
  }

  // Zero a warpgroup's tile.
  __device__ __forceinline__ void zero(const Shape& s, int group_row, int first_column) const {
    Coords p(s.m, group_row, first_column);
#pragma unroll
    for (int i = 0; i < kQuads; ++i)
      if (valid(s, p, i)) at(p, i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
};

// Epilogue: chains that continue from `out` if kResume, else start from zero; stored in fp32.
template <bool kResume>
struct Chains {
  static constexpr bool kResumes = kResume;
  struct State {};
  Out out;

  // Loads are unconditional, with clamped addresses: conditional loads would keep the compiler from overlapping wgmmas.
  __device__ __forceinline__ State begin(const Shape& s, float (&sums)[128], int group_row, int first_column) const {
    if (!kResume) return {};
    Coords p(s.m, group_row, first_column);
    float4 quads[kQuads];
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float* row = out.data + min(p.row + i / 16 * 8, s.m - 1) * out.pitch;
      quads[i] = *reinterpret_cast<const float4*>(row + min(p.quad + i % 16 * 16, s.n - 4));
    }
#pragma unroll
    for (int i = 0; i < kQuads; ++i) set_quad(sums, p, i, quads[i]);
    return {};
  }

  __device__ __forceinline__ void prefetch(const Shape& s, int row, int first_column) const {
    if (kResume) out.prefetch(s, row, first_column);
  }

  __device__ __forceinline__ void run(const Shape& s, float (&sums)[128], int group_row, int first_column,
                                      State) const {
    Coords p(s.m, group_row, first_column);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      float4 quad = quad_of(sums, p, i);
      if (out.valid(s, p, i)) out.at(p, i) = quad;
    }
  }

  __device__ __forceinline__ void skip(const Shape& s, int group_row, int first_column) const {
    if (!kResume) out.zero(s, group_row, first_column);
  }
};

// Epilogue: chains from zero, added in fp32 to `out`.
struct Added : FromZero {
  Out out;

  __device__ __forceinline__ void prefetch(const Shape& s, int row, int first_column) const {
    out.prefetch(s, row, first_column);
  }

  __device__ __forceinline__ void run(const Shape& s, float (&sums)[128], int group_row, int first_column,
                                      State) const {
    Coords p(s.m, group_row, first_column);
    constexpr int batch = 16;  // schedule: loads in flight
#pragma unroll
    for (int i = 0; i < kQuads; i += batch) {
      float4 before[batch];
#pragma unroll
      for (int j = 0; j < batch; ++j)
        before[j] = out.valid(s, p, i + j) ? out.at(p, i + j) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int j = 0; j < batch; ++j) {
        float4 a = before[j], b = quad_of(sums, p, i + j);
        if (out.valid(s, p, i + j)) out.at(p, i + j) = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
      }
    }
  }

  __device__ __forceinline__ void skip(const Shape&, int, int) const {}
};

// Epilogue: chains from zero, rounded to bf16.
struct Rounded : FromZero {
  __nv_bfloat16* out;  // [m, n], n a multiple of 8

  __device__ __forceinline__ void run(const Shape& s, float (&sums)[128], int group_row, int first_column,
                                      State) const {
    store_rows(sums, Coords(s.m, group_row, first_column), out, s.n, s.n, first_column);
  }

  __device__ __forceinline__ void skip(const Shape& s, int group_row, int first_column) const {
    float zeros[128] = {};
    run(s, zeros, group_row, first_column, {});
  }
};

constexpr Layout kPlain = Layout::kPlain, kTransposed = Layout::kTransposed;

// Launch dweight's GEMM. before: the shape of the GEMM launched just before, whose output this one does not read, or
// null.
template <class Epilogue>
cudaError_t launch_dweight(const Matrix& dz, const Matrix& hidden, const Shape& s, const Epilogue& epilogue,
                           const Shape* before, cudaStream_t stream) {
  return before ? launch<kTransposed, kTransposed, Order::kOverlap>(dz, hidden, s, epilogue, stream, before)
                : launch<kTransposed, kTransposed>(dz, hidden, s, epilogue, stream);
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// Arguments, filled by alignkit/ops/linear_logp/cuda_backend.py.
struct AlignkitHeadProducts {
  const void *dz, *weight, *hidden;
  int64_t dz_pitch, weight_pitch, hidden_pitch;
  int rows, ids, d;
  const int* count;
  int before;
  float* dhidden;
  int64_t dhidden_pitch;
  int resume;
  void* dweight;
  int64_t dweight_pitch;
  int rounded, add;
};
ALIGNKIT_STRUCT(AlignkitHeadProducts, dz, weight, hidden, dz_pitch, weight_pitch, hidden_pitch, rows, ids, d, count,
                before, dhidden, dhidden_pitch, resume, dweight, dweight_pitch, rounded, add)

// dhidden [rows, d] = dz [rows, ids] . weight [ids, d], and dweight [ids, d] = dz^T . hidden [rows, d]; either output
// may be null. Returns a cudaError_t. Not checked here: d is a multiple of 8, and pitches are multiples of 16 bytes
// (`head_products_rejects` in alignkit/ops/linear_logp/cuda_backend.py).
//
// - resume: dhidden's chains continue from its contents.
// - rounded: dweight is bf16 and contiguous; otherwise fp32, added to its contents if `add`.
// - count, before: see Count; rows that are not valid contribute zeros.
extern "C" int alignkit_head_products(const AlignkitHeadProducts* p, cudaStream_t stream) {
  Matrix dz{p->dz, p->dz_pitch};
  Count count{p->count, p->before};
  const Shape dhidden_shape{p->rows, p->d, p->ids, count, {}};
  if (p->dhidden) {
    Matrix weight{p->weight, p->weight_pitch};
    Out out{p->dhidden, p->dhidden_pitch};
    cudaError_t e = p->resume ? launch<kPlain, kTransposed>(dz, weight, dhidden_shape, Chains<true>{out}, stream)
                              : launch<kPlain, kTransposed>(dz, weight, dhidden_shape, Chains<false>{out}, stream);
    if (e) return e;
  }
  if (!p->dweight) return cudaSuccess;
  Shape s{p->ids, p->d, p->rows, count, {}};
  Matrix hidden{p->hidden, p->hidden_pitch};
  const Shape* before = p->dhidden ? &dhidden_shape : nullptr;
  if (p->rounded)
    return launch_dweight(dz, hidden, s, Rounded{{}, static_cast<__nv_bfloat16*>(p->dweight)}, before, stream);
  Out out{static_cast<float*>(p->dweight), p->dweight_pitch};
  return p->add ? launch_dweight(dz, hidden, s, Added{{}, out}, before, stream)
                : launch_dweight(dz, hidden, s, Chains<false>{out}, before, stream);
}

ALIGNKIT_FUNCTION(alignkit_head_products)
