// Types shared by the instruction-set variants, and the table of kernels that each variant fills. Included before the
// variant sets its target, so that no header code is compiled for one instruction set and linked into all.
//
// alignkit/runtime/native.py mirrors DType, Routing and Attention; api.cpp exports the layouts that it checks.
#pragma once
#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace alignkit {

typedef int64_t i64;

enum DType : int { F32 = 0, BF16 = 1, F16 = 2 };

// Sets round-to-nearest without flushing of denormals for its lifetime, as the contract requires; engines may set other
// modes. Every thread that computes holds one.
struct DefaultRounding {
#if defined(__x86_64__)
    unsigned saved = _mm_getcsr();
    DefaultRounding() { _mm_setcsr(0x1f80); }
    ~DefaultRounding() { _mm_setcsr(saved); }
#else
    std::fenv_t saved;
    DefaultRounding() { std::fegetenv(&saved); std::fesetenv(FE_DFL_ENV); }
    ~DefaultRounding() { std::fesetenv(&saved); }
#endif
};

struct Matrix {  // element (i, j) is data[i * row + j * col]
    const void* data;
    int dtype;
    i64 row, col;
};

struct Transform {  // logit = scale * cap * tanh((x + bias) / cap) / temperature; null members are skipped
    const float *bias, *cap, *scale, *temperature;  // [cols], scalar, scalar, [rows]
};

struct Routing {  // MoE router: selection and weighting of a token's experts
    i64 experts, top_k, groups, top_groups;
    int sigmoid, normalize;
    float scale;
};

struct Attention {
    int dtype, threads;
    i64 heads_q, heads_kv, dim, seqs;
    float scale;
    const void *q, *k, *v;          // element (t, h, d) is data[t * row + h * head + d]
    i64 q_row, q_head, k_row, k_head, v_row, v_head;
    const i64 *q_start;             // [seqs + 1] first query row of each sequence
    const i64 *kv_start;            // [seqs + 1] offset of each sequence's positions in kv_rows
    const i64 *kv_rows;             // row of k and v for each position; null: kv_start + position
};

struct Kernels {  // initialized in this order at the end of kernels.inl
    const char* name;
    void (*gemm)(i64 m, i64 n, i64 k, i64 leaves, Matrix a, Matrix b, float* c, i64 ldc, int accumulate, int threads);
    void (*round)(i64 rows, i64 cols, const float* x, i64 ldx, const float* bias, int dtype, void* y, i64 y_row,
                  i64 y_col, int threads);
    void (*add)(i64 n, int dtype, const void* a, const void* b, void* y, int threads);
    void (*logits)(i64 rows, i64 cols, int dtype, const void* x, i64 ldx, Transform transform, float* z, i64 ldz,
                   float* capped, int threads);
    void (*logits_back)(i64 rows, i64 cols, float* g, i64 ldg, Transform transform, const float* capped, int threads);
    void (*join)(i64 rows, i64 tiles, const float* m, const int32_t* q, const int32_t* u, const float* given_max,
                 float* top, i64* s, i64* v, int threads);
    void (*log_probs)(i64 rows, i64 cols, int dtype, const void* z, i64 ldz, const float* temperature,
                      const double* lse, float* out, i64 ldo, int threads);
    void (*tile_stats)(i64 rows, i64 cols, i64 tile, const float* z, i64 ldz, float* m, int32_t* q, int32_t* u,
                       i64 ld_out, int threads);
    void (*logits_grad)(i64 rows, i64 cols, float* z, i64 ldz, const float* lse, const float* entropy,
                        const float* g_logp, const float* g_entropy, const i64* column, int threads);
    void (*rms_norm)(i64 rows, i64 n, int dtype, const void* x, i64 ldx, const float* w, int zero_centered, float eps,
                     void* y, float* rstd, int threads);
    void (*rms_norm_grad)(i64 rows, i64 n, int dtype, const void* dy, const void* x, const float* w, int zero_centered,
                          const float* rstd, void* dx, float* dw, int threads);
    void (*rope)(i64 tokens, i64 heads, i64 dim, i64 rotary, int dtype, int inverse, const void* x, i64 row, i64 head,
                 const i64* positions, const float* table, void* y, int threads);
    void (*silu_mul)(i64 rows, i64 n, int dtype, const void* g, i64 ldg, const void* u, i64 ldu, void* y, int threads);
    void (*silu_mul_grad)(i64 rows, i64 n, int dtype, const void* g, i64 ldg, const void* u, i64 ldu, const void* dy,
                          void* dg, i64 lddg, void* du, i64 lddu, int threads);
    void (*sigmoid_mul)(i64 rows, i64 n, int dtype, const float* gate, const void* x, void* y, int threads);
    void (*sigmoid_mul_grad)(i64 rows, i64 n, int dtype, const float* gate, const void* x, const void* dy, float* dgate,
                             void* dx, int threads);
    void (*route)(i64 rows, Routing routing, const float* z, const float* bias, float* weights, i64* ids, int threads);
    void (*route_grad)(i64 rows, Routing routing, const float* z, const i64* ids, const float* grad, float* dz,
                       int threads);
    void (*combine)(i64 rows, i64 cols, i64 k, i64 experts, int dtype, const void* y, const i64* place, const i64* ids,
                    const float* weights, int out_dtype, void* out, int threads);
    void (*weigh)(i64 rows, i64 n, int dtype, const float* g, const void* a, const float* w, float* dw, void* wg,
                  void* wa, int threads);
    void (*attention)(const Attention& p, void* out, float* m, float* l);
    void (*attention_grad)(const Attention& p, const void* out, const float* m, const float* l, const void* d_out,
                           float* dq, float* dk, float* dv);
    void (*exp)(i64 n, const float* x, float* y);
};

const Kernels* generic_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace alignkit
