// The products of the head's backward pass, over the rows that count: the device knows how many these are, the host does not.
#include "product.cuh"

namespace alignkit {
namespace {

// fp32 [m, n], rows `pitch` elements apart; both multiples of 4.
struct Out {
  float* data;
  int64_t pitch;

  // Of the 64 pairs of sums that a thread has, 32 in each of two rows.
  static constexpr int kPairs = 64;

  __device__ __forceinline__ bool here(const Shape& s, const Place& p, int i) const {
    return p.here[i / 32] && p.column + i % 32 * 8 < s.n;
  }

  __device__ __forceinline__ float2& at(const Place& p, int i) const {
    return *reinterpret_cast<float2*>(data + (p.row + i / 32 * 8) * pitch + p.column + i % 32 * 8);
  }

  // Where pair i lies among the sums.
  static __device__ __forceinline__ int from(int i) { return i % 32 * 4 + i / 32 * 2; }

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
    for (int i = 0; i < kPairs; ++i)
      if (here(s, p, i)) at(p, i) = make_float2(0.0f, 0.0f);
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
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* row = out.data + min(p.row + 8 * h, s.m - 1) * out.pitch;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        float2 pair = *reinterpret_cast<const float2*>(row + min(p.column + 8 * j, s.n - 2));
        sums[4 * j + 2 * h] = pair.x;
        sums[4 * j + 2 * h + 1] = pair.y;
      }
    }
    return {};
  }

  __device__ __forceinline__ void prefetch(const Shape& s, int row, int first_column) const {
    if (kResume) out.prefetch(s, row, first_column);
  }

  __device__ __forceinline__ void run(const Shape& s, float (&sums)[128], int group_row, int first_column, State) const {
    Place p(s.m, group_row, first_column);
#pragma unroll
    for (int i = 0; i < Out::kPairs; ++i)
      if (out.here(s, p, i)) out.at(p, i) = make_float2(sums[Out::from(i)], sums[Out::from(i) + 1]);
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
    constexpr int some = 32;  // loads that are on their way together
#pragma unroll
    for (int i = 0; i < Out::kPairs; i += some) {
      float2 before[some];
#pragma unroll
      for (int j = 0; j < some; ++j) before[j] = out.here(s, p, i + j) ? out.at(p, i + j) : make_float2(0.0f, 0.0f);
#pragma unroll
      for (int j = 0; j < some; ++j) {
        int from = Out::from(i + j);
        float2 sum = make_float2(before[j].x + sums[from], before[j].y + sums[from + 1]);
        if (out.here(s, p, i + j)) out.at(p, i + j) = sum;
      }
    }
  }

  __device__ __forceinline__ void skip(const Shape&, int, int) const {}
};

struct Rounded : FromZero {
  __nv_bfloat16* out;  // [m, n], n a multiple of 8

  __device__ __forceinline__ void run(const Shape& s, float (&sums)[128], int group_row, int first_column, State) const {
    store_rows(sums, Place(s.m, group_row, first_column), out, s.n, first_column);
  }

  __device__ __forceinline__ void skip(const Shape& s, int group_row, int first_column) const {
    float zeros[128] = {};
    run(s, zeros, group_row, first_column, {});
  }
};

constexpr Layout kPlain = Layout::kPlain, kTransposed = Layout::kTransposed;

template <class Epilogue>
cudaError_t by_rows(const Matrix& dz, const Matrix& hidden, const Shape& s, const Epilogue& epilogue, bool beside,
                    cudaStream_t stream) {
  return beside ? launch<kTransposed, kTransposed, Order::kBeside>(dz, hidden, s, epilogue, stream)
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

// dhidden [rows, d] = dz [rows, ids] . weight [ids, d], which goes on from what dhidden holds if `resume`, and dweight [ids, d]
// = dz^T . hidden [rows, d], bf16 if `rounded` (and contiguous), else added to what it holds if `add`; either may be null. Of
// the rows, `before` of a batch come before these and the first *count of the batch count; the others are taken for zeros.
// Returns a cudaError_t.
extern "C" int alignkit_head_products(const AlignkitHeadProducts* p, cudaStream_t stream) {
  Matrix dz{p->dz, p->dz_pitch};
  Count count{p->count, p->before};
  if (p->dhidden) {
    Matrix weight{p->weight, p->weight_pitch};
    Out out{p->dhidden, p->dhidden_pitch};
    Shape s{p->rows, p->d, p->ids, count};
    cudaError_t e = p->resume ? launch<kPlain, kTransposed>(dz, weight, s, Chains<true>{out}, stream)
                              : launch<kPlain, kTransposed>(dz, weight, s, Chains<false>{out}, stream);
    if (e) return e;
  }
  if (!p->dweight) return cudaSuccess;
  Shape s{p->ids, p->d, p->rows, count};
  Matrix hidden{p->hidden, p->hidden_pitch};
  bool beside = p->dhidden != nullptr;  // which reads nothing that the other writes
  if (p->rounded) return by_rows(dz, hidden, s, Rounded{{}, static_cast<__nv_bfloat16*>(p->dweight)}, beside, stream);
  Out out{static_cast<float*>(p->dweight), p->dweight_pitch};
  return p->add ? by_rows(dz, hidden, s, Added{{}, out}, beside, stream)
                : by_rows(dz, hidden, s, Chains<false>{out}, beside, stream);
}
