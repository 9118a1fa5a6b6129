// Types shared by the instruction-set variants, and the table of kernels that each variant fills. Included before the
// variant sets its target, so that no header code is compiled for one instruction set and linked into all.
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

#include "alignkit/runtime/kernels.h"

namespace alignkit {

typedef int64_t i64;

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

struct Kernels {
    const char* name;
#define ALIGNKIT_ENTRY(name, parameters) void (*name) parameters;
#define ALIGNKIT_KERNEL(name, parameters) void (*name) parameters;
#include "entries.inl"
};

const Kernels* generic_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace alignkit
