// Functions of the CPU library. No torch headers: one build serves every torch version. Matrices are row-major; ld* and
// *_row are strides in elements. `dtype` is a DType of alignkit/runtime/kernels.h.
#include "../interface.h"
#include "prelude.h"

#include <type_traits>

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

ALIGNKIT_STRUCT(Routing, experts, top_k, groups, top_groups, sigmoid, normalize, scale)
ALIGNKIT_STRUCT(Attention, dtype, threads, heads_q, heads_kv, dim, seqs, scale, q, k, v, q_row, q_head, k_row, k_head,
                v_row, v_head, q_start, kv_start, kv_rows)

// Function that calls a kernel of the table in use, with structs by reference.
namespace {
template <auto kKernel> struct Forward;
template <class... A, void (*Kernels::*kKernel)(A...)> struct Forward<kKernel> {
    template <class T> using Passed = std::conditional_t<std::is_class_v<T>, const T&, T>;
    static void call(Passed<A>... arguments) { (current->*kKernel)(arguments...); }
};
}  // namespace
#define ALIGNKIT_ENTRY(name, parameters) ALIGNKIT_FUNCTION_AS(alignkit_##name, Forward<&Kernels::name>::call)
#define ALIGNKIT_KERNEL(name, parameters) ALIGNKIT_FUNCTION(alignkit_##name)

// Return the name of the instruction set in use.
static const char* alignkit_isa() { return current->name; }

// Select an instruction set by name, "" for the best. Returns 0 and changes nothing if this CPU lacks it.
static int alignkit_choose_isa(const char* name) {
    const Kernels* k = pick(name);
    if (k) current = k;
    return k != nullptr;
}

static void alignkit_gemm(i64 m, i64 n, i64 k, i64 leaves, const void* a, int a_type, i64 a_row, i64 a_col,
                          const void* b, int b_type, i64 b_row, i64 b_col, float* c, i64 ldc, int accumulate,
                          int threads) {
    current->gemm(m, n, k, leaves, {a, a_type, a_row, a_col}, {b, b_type, b_row, b_col}, c, ldc, accumulate, threads);
}

static void alignkit_logits(i64 rows, i64 cols, int dtype, const void* x, i64 ldx, const float* bias, const float* cap,
                            const float* scale, const float* temperature, float* z, i64 ldz, float* capped,
                            int threads) {
    current->logits(rows, cols, dtype, x, ldx, {bias, cap, scale, temperature}, z, ldz, capped, threads);
}

static void alignkit_logits_back(i64 rows, i64 cols, float* g, i64 ldg, const float* cap, const float* scale,
                                 const float* temperature, const float* capped, int threads) {
    current->logits_back(rows, cols, g, ldg, {nullptr, cap, scale, temperature}, capped, threads);
}

// The functions below call the C library in double and round once. They are scalar, so that an element's position
// cannot change its bits.

// lse <- m + log(s * 2^-39).
static void alignkit_lse(i64 n, const float* m, const i64* s, double* lse) {
    DefaultRounding guard;
    for (i64 i = 0; i < n; ++i) lse[i] = double(m[i]) + std::log(double(s[i]) * 0x1p-39);
}

// logp and lse of each row, and entropy unless null: from the row's maximum m, its integer sums s and u, and the
// target's logit z.
static void alignkit_finish(i64 n, const float* m, const i64* s, const i64* u, const float* z, float* logp, float* lse,
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
static void alignkit_rope_table(i64 positions, i64 half, const double* frequencies, double factor, float* table) {
    DefaultRounding guard;
    for (i64 j = 0; j < half; ++j) {
        for (i64 t = 0; t < positions; ++t) {
            table[t * 2 * half + j] = float(factor * std::cos(double(t) * frequencies[j]));
            table[t * 2 * half + half + j] = float(factor * std::sin(double(t) * frequencies[j]));
        }
    }
}

ALIGNKIT_FUNCTION(alignkit_isa)
ALIGNKIT_FUNCTION(alignkit_choose_isa)
ALIGNKIT_FUNCTION(alignkit_lse)
ALIGNKIT_FUNCTION(alignkit_finish)
ALIGNKIT_FUNCTION(alignkit_rope_table)
#include "entries.inl"
