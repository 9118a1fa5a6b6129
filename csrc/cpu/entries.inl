// The CPU kernels, an entry each. An entry makes the kernel's member of Kernels (prelude.h) and its place in the tables
// that kernels.inl fills, in this order. ALIGNKIT_ENTRY also makes the library's function NAME (api.cpp) with the same
// parameters; a struct is passed by its address. api.cpp defines the functions of ALIGNKIT_KERNEL, whose parameters
// differ. The op's cpu.py, or runtime/native.py, passes the arguments in this order.
ALIGNKIT_KERNEL(gemm, (i64 m, i64 n, i64 k, i64 leaves, Matrix a, Matrix b, float* c, i64 ldc, int accumulate,
    int threads))
ALIGNKIT_ENTRY(round, (i64 rows, i64 cols, const float* x, i64 ldx, const float* bias, int dtype, void* y, i64 y_row,
    i64 y_col, int threads))
ALIGNKIT_ENTRY(add, (i64 n, int dtype, const void* a, const void* b, void* y, int threads))
ALIGNKIT_KERNEL(logits, (i64 rows, i64 cols, int dtype, const void* x, i64 ldx, Transform transform, float* z, i64 ldz,
    float* capped, int threads))
ALIGNKIT_KERNEL(logits_back, (i64 rows, i64 cols, float* g, i64 ldg, Transform transform, const float* capped,
    int threads))
ALIGNKIT_ENTRY(join, (i64 rows, i64 tiles, const float* m, const int32_t* q, const int32_t* u, const float* given_max,
    float* top, i64* s, i64* v, int threads))
ALIGNKIT_ENTRY(log_probs, (i64 rows, i64 cols, int dtype, const void* z, i64 ldz, const float* temperature,
    const double* lse, float* out, i64 ldo, int threads))
ALIGNKIT_ENTRY(tile_stats, (i64 rows, i64 cols, i64 tile, const float* z, i64 ldz, float* m, int32_t* q, int32_t* u,
    i64 ld_out, int threads))
ALIGNKIT_ENTRY(logits_grad, (i64 rows, i64 cols, float* z, i64 ldz, const float* lse, const float* entropy,
    const float* g_logp, const float* g_entropy, const i64* column, int threads))
ALIGNKIT_ENTRY(rms_norm, (i64 rows, i64 n, int dtype, const void* x, i64 ldx, const float* w, int zero_centered,
    float eps, void* y, float* rstd, int threads))
ALIGNKIT_ENTRY(rms_norm_grad, (i64 rows, i64 n, int dtype, const void* dy, const void* x, const float* w,
    int zero_centered, const float* rstd, void* dx, float* dw, int threads))
ALIGNKIT_ENTRY(rope, (i64 tokens, i64 heads, i64 dim, i64 rotary, int dtype, int inverse, const void* x, i64 row,
    i64 head, const i64* positions, const float* table, void* y, int threads))
ALIGNKIT_ENTRY(silu_mul, (i64 rows, i64 n, int dtype, const void* g, i64 ldg, const void* u, i64 ldu, void* y,
    int threads))
ALIGNKIT_ENTRY(silu_mul_grad, (i64 rows, i64 n, int dtype, const void* g, i64 ldg, const void* u, i64 ldu,
    const void* dy, void* dg, i64 lddg, void* du, i64 lddu, int threads))
ALIGNKIT_ENTRY(bit_sums, (i64 rows, i64 n, int bytes, const void* x, i64 ldx, const i64* w, i64* out, int threads))
ALIGNKIT_ENTRY(sigmoid_mul, (i64 rows, i64 n, int dtype, const float* gate, const void* x, void* y, int threads))
ALIGNKIT_ENTRY(sigmoid_mul_grad, (i64 rows, i64 n, int dtype, const float* gate, const void* x, const void* dy,
    float* dgate, void* dx, int threads))
ALIGNKIT_ENTRY(sigmoid_mul_each, (i64 rows, i64 n, int dtype, const void* gate, i64 ldg, const void* x, i64 ldx,
    void* y, int threads))
ALIGNKIT_ENTRY(sigmoid_mul_each_grad, (i64 rows, i64 n, int dtype, const void* gate, i64 ldg, const void* x, i64 ldx,
    const void* dy, void* dgate, void* dx, int threads))
ALIGNKIT_ENTRY(l2_norm, (i64 rows, i64 n, int dtype, const void* x, i64 ldx, float eps, void* y, float* scale,
    int threads))
ALIGNKIT_ENTRY(l2_norm_grad, (i64 rows, i64 n, int dtype, const void* dy, const void* x, i64 ldx, const float* scale,
    void* dx, int threads))
ALIGNKIT_ENTRY(gated_rms_norm, (i64 rows, i64 n, int dtype, const void* x, i64 ldx, const float* w, const void* z,
    i64 ldz, float eps, void* y, float* rstd, int threads))
ALIGNKIT_ENTRY(gated_rms_norm_grad, (i64 rows, i64 n, int dtype, const void* dy, const void* x, i64 ldx, const float* w,
    const void* z, i64 ldz, const float* rstd, void* dx, float* dw, void* dz, int threads))
ALIGNKIT_ENTRY(delta_gates, (i64 rows, i64 n, int dtype, const void* a, i64 lda, const void* b, i64 ldb,
    const float* a_log, const float* dt_bias, float* g, float* beta, int threads))
ALIGNKIT_ENTRY(delta_gates_grad, (i64 rows, i64 n, int dtype, const float* dg, const float* dbeta, const void* a,
    i64 lda, const float* a_log, const float* dt_bias, const float* g, const float* beta, void* da, void* db,
    float* d_log, float* d_bias))
ALIGNKIT_ENTRY(short_conv, (i64 seqs, i64 n, i64 taps, int dtype, const void* x, i64 ldx, const void* weight,
    const i64* starts, void* y, int threads))
ALIGNKIT_ENTRY(short_conv_grad, (i64 seqs, i64 n, i64 taps, int dtype, const void* dy, const void* x, i64 ldx,
    const void* weight, const i64* starts, float* dc, void* dx, float* dw, int threads))
ALIGNKIT_ENTRY(paged_short_conv, (i64 seqs, i64 n, i64 taps, int dtype, const void* x, i64 ldx, const void* weight,
    const i64* starts, const i64* lens, void* state, i64 slot_stride, i64 row_stride, const i64* slots, void* y,
    int threads))
ALIGNKIT_ENTRY(delta_rule, (i64 seqs, i64 heads_v, i64 heads_k, i64 K, i64 V, int dtype, const void* q, const void* k,
    const void* v, const float* g, const float* beta, const i64* starts, float scale, void* out, int threads))
ALIGNKIT_ENTRY(paged_delta_rule, (i64 seqs, i64 heads_v, i64 heads_k, i64 K, i64 V, int dtype, const void* q,
    const void* k, const void* v, const float* g, const float* beta, const i64* starts, const i64* lens, float scale,
    float* pages, i64 page_stride, i64 head_stride, const i64* slots, void* out, int threads))
ALIGNKIT_ENTRY(route, (i64 rows, Routing routing, const float* z, const float* bias, float* weights, i64* ids,
    int threads))
ALIGNKIT_ENTRY(route_grad, (i64 rows, Routing routing, const float* z, const i64* ids, const float* grad, float* dz,
    int threads))
ALIGNKIT_ENTRY(combine, (i64 rows, i64 cols, i64 k, i64 experts, int dtype, const void* y, const i64* place,
    const i64* ids, const float* weights, int out_dtype, void* out, int threads))
ALIGNKIT_ENTRY(weigh, (i64 rows, i64 n, int dtype, const float* g, const void* a, const float* w, float* dw, void* wg,
    void* wa, int threads))
ALIGNKIT_ENTRY(attention, (const Attention& p, void* out, float* m, float* l))
ALIGNKIT_ENTRY(attention_grad, (const Attention& p, const void* out, const float* m, const float* l, const void* d_out,
    float* dq, float* dk, float* dv))
ALIGNKIT_ENTRY(exp, (i64 n, const float* x, float* y))
#undef ALIGNKIT_ENTRY
#undef ALIGNKIT_KERNEL
