// The products of the head's backward pass, over the rows that count: the device knows how many these are, the host does not.
#include "../../interface.h"
#include "../gemm/gemm.cuh"

namespace alignkit {
namespace {

// fp32 [m, n], rows `pitch` elements apart; both multiples of 4.
struct Out {
  float* data;
  int64_t pitch;

  __device__ __forceinline__ bool here(const Shape& s, const Place& p, int i) const {
    return p.here[i / 16] && p.quad + i % 16 * 16 < s.n;
  }

  __device__ __forceinline__ float4& at(const Place& p, int i) const {
    return *reinterpret_cast<float4*>(data + (p.row + i / 16 * 8) * pitch + p.quad + i % 16 * 16);
  }

  // Rows of a block's tile.
  __device__ __forceinline__ void prefetch(const Shape& s, int row, int first_column) const {
    const float* from = data + row * pitch + first_column;
    int bytes = min(s.n - first_column, kColumns) * static_cast<int>(sizeof(float));
#pragma unroll 1
    for (int i = min(s.m - row, kRows); i > 0; --i, from += pitch) alignkit::prefetch(from, bytes);
  }

  __device__ __forceinline__ void zero(const Shape& s, int group_row, int first_column) const {
    Place p(s.m, group_row, first_column);
#pragma unroll
    for (int i = 0; i < kQuads; ++i)
      if (here(s, p, i)) at(p, i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
};

// Chains that go on from `out` if kResume.
template <bool kResume>
struct Chains {
  static constexpr bool kResumes = kResume;
  struct State {};
  Out out;

  // Every sum is loaded, whatever its place: loads under a condition would keep the compiler from overlapping products.
  __device__ __forceinline__ State begin(const Shape& s, float (&sums)[128], int group_row, int first_column) const {
    if (!kResume) return {};
    Place p(s.m, group_row, first_column);
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

  __device__ __forceinline__ void run(const Shape& s, float (&sums)[128], int group_row, int first_column, State) const {
    Place p(s.m, group_row, first_column);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      float4 quad = quad_of(sums, p, i);
      if (out.here(s, p, i)) out.at(p, i) = quad;
    }
  }

  __device__ __forceinline__ void skip(const Shape& s, int group_row, int first_column) const {
    if (!kResume) out.zero(s, group_row, first_column);
  }
};

// Chains from zero, which are added to `out`.
struct Added : FromZero {
  Out out;

  __device__ __forceinline__ void prefetch(const Shape& s, int row, int first_column) const {
    out.prefetch(s, row, first_column);
  }

  __device__ __forceinline__ void run(const Shape& s, float (&sums)[128], int group_row, int first_column, State) const {
    Place p(s.m, group_row, first_column);
    constexpr int some = 16;  // loads that are on their way together
#pragma unroll
    for (int i = 0; i < kQuads; i += some) {
      float4 before[some];
#pragma unroll
      for (int j = 0; j < some; ++j)
        before[j] = out.here(s, p, i + j) ? out.at(p, i + j) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int j = 0; j < some; ++j) {
        float4 a = before[j], b = quad_of(sums, p, i + j);
        if (out.here(s, p, i + j)) out.at(p, i + j) = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
      }
    }
  }

  __device__ __forceinline__ void skip(const Shape&, int, int) const {}
};

struct Rounded : FromZero {
  __nv_bfloat16* out;  // [m, n], n a multiple of 8

  __device__ __forceinline__ void run(const Shape& s, float (&sums)[128], int group_row, int first_column, State) const {
    store_rows(sums, Place(s.m, group_row, first_column), out, s.n, s.n, first_column);
  }

  __device__ __forceinline__ void skip(const Shape& s, int group_row, int first_column) const {
    float zeros[128] = {};
    run(s, zeros, group_row, first_column, {});
  }
};

constexpr Layout kPlain = Layout::kPlain, kTransposed = Layout::kTransposed;

// before: the product launched before, of which this one reads nothing; or null.
template <class Epilogue>
cudaError_t by_rows(const Matrix& dz, const Matrix& hidden, const Shape& s, const Epilogue& epilogue, const Shape* before,
                    cudaStream_t stream) {
  return before ? launch<kTransposed, kTransposed, Order::kBeside>(dz, hidden, s, epilogue, stream, before)
                : launch<kTransposed, kTransposed>(dz, hidden, s, epilogue, stream);
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

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
ALIGNKIT_LAYOUT(AlignkitHeadProducts, dz, weight, hidden, dz_pitch, weight_pitch, hidden_pitch, rows, ids, d, count,
                before, dhidden, dhidden_pitch, resume, dweight, dweight_pitch, rounded, add)

// dhidden [rows, d] = dz [rows, ids] . weight [ids, d], which goes on from what dhidden holds if `resume`, and dweight [ids, d]
// = dz^T . hidden [rows, d], bf16 if `rounded` (and contiguous), else added to what it holds if `add`; either may be null. Of
// the rows, `before` of a batch come before these and the first *count of the batch count; the others are taken for zeros.
// Returns a cudaError_t.
extern "C" int alignkit_head_products(const AlignkitHeadProducts* p, cudaStream_t stream) {
  Matrix dz{p->dz, p->dz_pitch};
  Count count{p->count, p->before};
  const Shape of_dhidden{p->rows, p->d, p->ids, count, {}};
  if (p->dhidden) {
    Matrix weight{p->weight, p->weight_pitch};
    Out out{p->dhidden, p->dhidden_pitch};
    cudaError_t e = p->resume ? launch<kPlain, kTransposed>(dz, weight, of_dhidden, Chains<true>{out}, stream)
                              : launch<kPlain, kTransposed>(dz, weight, of_dhidden, Chains<false>{out}, stream);
    if (e) return e;
  }
  if (!p->dweight) return cudaSuccess;
  Shape s{p->ids, p->d, p->rows, count, {}};
  Matrix hidden{p->hidden, p->hidden_pitch};
  const Shape* before = p->dhidden ? &of_dhidden : nullptr;
  if (p->rounded) return by_rows(dz, hidden, s, Rounded{{}, static_cast<__nv_bfloat16*>(p->dweight)}, before, stream);
  Out out{static_cast<float*>(p->dweight), p->dweight_pitch};
  return p->add ? by_rows(dz, hidden, s, Added{{}, out}, before, stream)
                : by_rows(dz, hidden, s, Chains<false>{out}, before, stream);
}
