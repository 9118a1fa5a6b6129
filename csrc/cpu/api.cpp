// C ABI of the CPU kernels, called by alignkit/runtime/native.py without declared types: change both together. No torch
// headers: one build serves every torch version. Matrices are row-major; ld* and *_row are strides in elements. `dtype`
// is a DType of prelude.h.
#include "../interface.h"
#include "prelude.h"

using namespace alignkit;

// Return the named kernel table, or the best that this CPU supports if the name is empty or null; null if unsupported.
static const Kernels* pick(const char* name) {
    const Kernels* all[3] = {generic_kernels(), nullptr, nullptr};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) all[1] = avx2_kernels();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        all[2] = avx512_kernels();
#endif
    for (int i = 2; i >= 0; --i)
        if (all[i] && (!name || !*name || !std::strcmp(name, all[i]->name))) return all[i];
    return nullptr;
}

static const Kernels* current = pick(nullptr);

ALIGNKIT_LAYOUT(Routing, experts, top_k, groups, top_groups, sigmoid, normalize, scale)
ALIGNKIT_LAYOUT(Attention, dtype, threads, heads_q, heads_kv, dim, seqs, scale, q, k, v, q_row, q_head, k_row, k_head,
                v_row, v_head, q_start, kv_start, kv_rows)

extern "C" {

// Return the name of the instruction set in use.
const char* alignkit_isa() { return current->name; }

// Select an instruction set by name, "" for the best. Returns 0 and changes nothing if this CPU lacks it.
int alignkit_choose_isa(const char* name) {
    const Kernels* k = pick(name);
    if (k) current = k;
    return k != nullptr;
}

#define ALIGNKIT_PLAIN(name, parameters, arguments) \
    void alignkit_##name parameters { current->name arguments; }
#define ALIGNKIT_KERNEL(name, parameters)
#include "entries.inl"

void alignkit_gemm(i64 m, i64 n, i64 k, i64 leaves, const void* a, int a_type, i64 a_row, i64 a_col, const void* b,
                   int b_type, i64 b_row, i64 b_col, float* c, i64 ldc, int accumulate, int threads) {
    current->gemm(m, n, k, leaves, {a, a_type, a_row, a_col}, {b, b_type, b_row, b_col}, c, ldc, accumulate, threads);
}

void alignkit_logits(i64 rows, i64 cols, int dtype, const void* x, i64 ldx, const float* bias, const float* cap,
                     const float* scale, const float* temperature, float* z, i64 ldz, float* capped, int threads) {
    current->logits(rows, cols, dtype, x, ldx, {bias, cap, scale, temperature}, z, ldz, capped, threads);
}

void alignkit_logits_back(i64 rows, i64 cols, float* g, i64 ldg, const float* cap, const float* scale,
                          const float* temperature, const float* capped, int threads) {
    current->logits_back(rows, cols, g, ldg, {nullptr, cap, scale, temperature}, capped, threads);
}

void alignkit_route(i64 rows, const Routing* routing, const float* z, const float* bias, float* weights, i64* ids,
                    int threads) {
    current->route(rows, *routing, z, bias, weights, ids, threads);
}

void alignkit_route_grad(i64 rows, const Routing* routing, const float* z, const i64* ids, const float* grad, float* dz,
                         int threads) {
    current->route_grad(rows, *routing, z, ids, grad, dz, threads);
}

void alignkit_attention(const Attention* p, void* out, float* m, float* l) { current->attention(*p, out, m, l); }

void alignkit_attention_grad(const Attention* p, const void* out, const float* m, const float* l, const void* d_out,
                             float* dq, float* dk, float* dv) {
    current->attention_grad(*p, out, m, l, d_out, dq, dk, dv);
}

// The functions below call the C library in double and round once. They are scalar, so that an element's position
// cannot change its bits.

// lse <- m + log(s * 2^-39).
void alignkit_lse(i64 n, const float* m, const i64* s, double* lse) {
    DefaultRounding guard;
    for (i64 i = 0; i < n; ++i) lse[i] = double(m[i]) + std::log(double(s[i]) * 0x1p-39);
}

// logp and lse of each row, and entropy unless null: from the row's maximum m, its integer sums s and u, and the
// target's logit z.
void alignkit_finish(i64 n, const float* m, const i64* s, const i64* u, const float* z, float* logp, float* lse,
                     float* entropy) {
    DefaultRounding guard;
    for (i64 i = 0; i < n; ++i) {
        double top = double(m[i]), sum = double(s[i]), row_lse = top + std::log(sum * 0x1p-39);
        logp[i] = float(double(z[i]) - row_lse);
        lse[i] = float(row_lse);
        if (entropy) entropy[i] = float(row_lse - top + double(u[i]) / sum);
    }
}

// table [positions, 2 half] <- factor * cos(t * frequency), then factor * sin(t * frequency), for each position t.
void alignkit_rope_table(i64 positions, i64 half, const double* frequencies, double factor, float* table) {
    DefaultRounding guard;
    for (i64 j = 0; j < half; ++j) {
        for (i64 t = 0; t < positions; ++t) {
            table[t * 2 * half + j] = float(factor * std::cos(double(t) * frequencies[j]));
            table[t * 2 * half + half + j] = float(factor * std::sin(double(t) * frequencies[j]));
        }
    }
}
}
