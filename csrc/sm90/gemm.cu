// The products of the head's backward pass, over the rows that count: the device knows how many these are, the host does not.
#include "product.cuh"

namespace alignkit {
namespace {

struct Sums {
  float* out;  // [m, n], rows `pitch` elements apart; even, as is n
  int64_t pitch;
  bool add;  // to what is there

  __device__ __forceinline__ void run(const Shape& s, float (&sums)[128], int group_row, int first_column) const {
    Place p(s.m, group_row, first_column);
    constexpr int some = 8;  // loads that are on their way together
#pragma unroll
    for (int i = 0; i < 64; i += some) {
      float2 before[some];
#pragma unroll
      for (int j = 0; j < some; ++j)
        before[j] = add && here(s, p, i + j) ? *at(p, i + j) : make_float2(0.0f, 0.0f);
#pragma unroll
      for (int j = 0; j < some; ++j) {
        int from = (i + j) % 32 * 4 + (i + j) / 32 * 2;
        float2 sum = make_float2(sums[from], sums[from + 1]);
        if (add) sum = make_float2(before[j].x + sum.x, before[j].y + sum.y);
        if (here(s, p, i + j)) *at(p, i + j) = sum;
      }
    }
  }

  __device__ __forceinline__ void skip(const Shape& s, int group_row, int first_column) const {
    Place p(s.m, group_row, first_column);
#pragma unroll
    for (int i = 0; i < 64; ++i)
      if (!add && here(s, p, i)) *at(p, i) = make_float2(0.0f, 0.0f);
  }

  // Of the 64 pairs of a thread, 32 in each row.
  __device__ __forceinline__ bool here(const Shape& s, const Place& p, int i) const {
    return p.here[i / 32] && p.column + i % 32 * 8 < s.n;
  }

  __device__ __forceinline__ float2* at(const Place& p, int i) const {
    return reinterpret_cast<float2*>(out + (p.row + i / 32 * 8) * pitch + p.column + i % 32 * 8);
  }
};

struct Rounded {
  __nv_bfloat16* out;  // [m, n], n a multiple of 8

  __device__ __forceinline__ void run(const Shape& s, float (&sums)[128], int group_row, int first_column) const {
    store_rows(sums, Place(s.m, group_row, first_column), out, s.n, first_column);
  }

  __device__ __forceinline__ void skip(const Shape& s, int group_row, int first_column) const {
    float zeros[128] = {};
    run(s, zeros, group_row, first_column);
  }
};

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// out [m, n] = a [m, k] . b [n, k]^T, b transposed in memory; a too if `a_transposed`. fp32 out, rows `out_pitch` apart, is
// added to if `add`; bf16 out is contiguous. Of m, or of k if a is transposed, `before` of a batch come before these and the
// first *count of the batch count; the rest is taken for zeros. Returns a cudaError_t.
extern "C" int alignkit_head_product(const void* a, int64_t a_pitch, int a_transposed, const void* b, int64_t b_pitch,
                                     void* out, int64_t out_pitch, int out_bf16, int add, int m, int n, int k,
                                     const int* count, int before, cudaStream_t stream) {
  constexpr Layout plain = Layout::kPlain, transposed = Layout::kTransposed;
  Shape s{m, n, k, {count, before}};
  Matrix left{a, a_pitch}, right{b, b_pitch};
  Sums sums{static_cast<float*>(out), out_pitch, add != 0};
  Rounded rounded{static_cast<__nv_bfloat16*>(out)};
  if (!a_transposed)
    return out_bf16 ? launch<plain, transposed>(left, right, s, rounded, stream)
                    : launch<plain, transposed>(left, right, s, sums, stream);
  return out_bf16 ? launch<transposed, transposed>(left, right, s, rounded, stream)
                  : launch<transposed, transposed>(left, right, s, sums, stream);
}
