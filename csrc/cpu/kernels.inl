// The CPU kernels of the contract, compiled once per instruction set. Every result is a fixed sequence of IEEE
// operations per output, so all variants give the same bits; only the number of outputs in flight differs.
// The operations and their order are the contract's (docs/contract.md); blocking, packing and threads are free.
// Compiled with -ffp-contract=off: a multiply-add is fused where the source says fma and nowhere else.

namespace alignkit {
namespace ISA {

// ---------------------------------------------------------------- scalars

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

static inline float bits_float(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
static inline uint32_t float_bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }
static inline float load(const float* p) { return *p; }
static inline float load(const bf16* p) { return bits_float(uint32_t(p->bits) << 16); }
static inline void store(float* p, float v) { *p = v; }
static inline void store(bf16* p, float v) {  // round to nearest, ties to even
    uint32_t u = float_bits(v);
    uint32_t r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    p->bits = uint16_t((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : r);
}
static inline void store(fp16* p, float v) {  // round to nearest even in integers: needs no hardware fp16
    uint32_t u = float_bits(v), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    uint32_t r;
    if (a > 0x7f800000) r = 0x7e00 | (a >> 13 & 0x3ff);
    else if (a >= 0x477ff000) r = 0x7c00;  // rounds to infinity: at least halfway past the largest fp16
    else if (a >= 0x38800000) r = (a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13;
    else if (a < 0x33000000) r = 0;  // below half of the smallest denormal
    else {  // denormal: a multiple of 2^-24
        uint32_t shift = 126 - (a >> 23), mantissa = (a & 0x7fffff) | 0x800000;
        r = (mantissa + (uint32_t(1) << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
    }
    p->bits = uint16_t(sign | r);
}
template <class T> static inline float round_to(float v) { T t; store(&t, v); return load(&t); }
static inline float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// exp(x): x = n ln2 + r with |r| <= ln2/2, a Taylor polynomial of degree 7 in r, times 2^n.
// 0 below -87 (the smallest normal result) and inf above 88.
static inline float exp1(float x) {
    float c = x < -87.f ? -87.f : (x > 88.f ? 88.f : x);
    float n = __builtin_rintf(c * 1.44269504f);
    float r = fma1(n, -0.693359375f, c);
    r = fma1(n, 2.12194440e-4f, r);
    float p = 1.f / 5040;
    p = fma1(p, r, 1.f / 720);
    p = fma1(p, r, 1.f / 120);
    p = fma1(p, r, 1.f / 24);
    p = fma1(p, r, 1.f / 6);
    p = fma1(p, r, 0.5f);
    p = fma1(p, r, 1.f);
    p = fma1(p, r, 1.f);
    float y = p * bits_float(uint32_t(int32_t(n) + 127) << 23);
    y = x < -87.f ? 0.f : y;
    y = x > 88.f ? std::numeric_limits<float>::infinity() : y;
    return x != x ? x : y;
}

// A minimal vector. The linker would merge std::vector's code across variants, so AVX-512 code could run on an AVX2
// CPU.
template <class T> class Array {
    T* data_ = nullptr;
    i64 size_ = 0, room_ = 0;
    Array(const Array&) = delete;
    void operator=(const Array&) = delete;

public:
    Array() {}
    explicit Array(i64 n, T value = T()) { assign(n, value); }
    ~Array() { std::free(data_); }
    void resize(i64 n) {  // contents are lost
        if (n > room_) {
            std::free(data_);
            data_ = static_cast<T*>(std::malloc(n * sizeof(T)));
            if (!data_) std::abort();
            room_ = n;
        }
        size_ = n;
    }
    void assign(i64 n, T value) {
        resize(n);
        for (i64 i = 0; i < n; ++i) data_[i] = value;
    }
    void swap(Array& other) {
        T* data = data_;
        i64 size = size_, room = room_;
        data_ = other.data_, size_ = other.size_, room_ = other.room_;
        other.data_ = data, other.size_ = size, other.room_ = room;
    }
    T& operator[](i64 i) { return data_[i]; }
    T* data() { return data_; }
    i64 size() const { return size_; }
};

// Call f(item) for each item in [0, n), distributed over threads.
template <class F> static void parallel(i64 n, int threads, F f) {
#pragma omp parallel num_threads(int(std::min<i64>(threads, std::max<i64>(n, 1)))) if (threads > 1 && n > 1)
    {
        DefaultRounding guard;
#pragma omp for schedule(dynamic)
        for (i64 i = 0; i < n; ++i) f(i);
    }
}

// Sum of N lanes by halving: lane i adds lane i + N / 2, then i + N / 4, ..., i + 1.
template <int N> static inline float tree(float* s) {
    for (int h = N / 2; h > 0; h /= 2)
        for (int i = 0; i < h; ++i) s[i] += s[i + h];
    return s[0];
}

// ---------------------------------------------------------------- matrix product

typedef float vf __attribute__((vector_size(VL * 4), aligned(4)));

static inline vf fmav(vf a, vf b, vf c) {
#if VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < VL; ++i) c[i] = fma1(a[i], b[i], c[i]);
    return c;
#endif
}

constexpr int NR = 32;                // mirrors alignkit/runtime/families.py:CPU.kv_block (see KB): columns per panel
constexpr int MR = VL == 16 ? 8 : 4;  // schedule: rows per packed panel
constexpr int NV = 2;                 // schedule: vectors per row held in registers

// Microkernel: continue the chains c[MR][ldc] by a[k][MR] * b[k][NR], ascending k.
static inline void micro(i64 k, const float* a, const float* b, float* c, i64 ldc) {
    for (int j0 = 0; j0 < NR; j0 += NV * VL) {
        vf acc[MR][NV];
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
            for (int j = 0; j < NV; ++j) std::memcpy(&acc[i][j], c + i * ldc + j0 + j * VL, sizeof(vf));
        for (i64 p = 0; p < k; ++p) {
            vf bv[NV];
            for (int j = 0; j < NV; ++j) std::memcpy(&bv[j], b + p * NR + j0 + j * VL, sizeof(vf));
#pragma GCC unroll 8
            for (int i = 0; i < MR; ++i) {
                vf av = a[p * MR + i] - vf{};
#pragma GCC unroll 2
                for (int j = 0; j < NV; ++j) acc[i][j] = fmav(av, bv[j], acc[i][j]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
            for (int j = 0; j < NV; ++j) std::memcpy(c + i * ldc + j0 + j * VL, &acc[i][j], sizeof(vf));
    }
}

// Pack rows [i0, i0 + width) of x into out[k][width], fp32; rows at or past `rows` are zero.
template <class T>
static void pack(const Matrix& x, i64 i0, i64 rows, i64 k, int width, float* out) {
    const T* d = static_cast<const T*>(x.data);
    i64 present = std::min<i64>(width, rows - i0);
    if (x.row == 1) {  // the panel is contiguous across rows
        for (i64 p = 0; p < k; ++p) {
            const T* s = d + i0 + p * x.col;
            for (int i = 0; i < present; ++i) out[p * width + i] = load(s + i);
            for (int i = int(present); i < width; ++i) out[p * width + i] = 0;
        }
        return;
    }
    constexpr i64 KB = 16;  // schedule: block of k whose scattered stores stay in cache
    for (i64 p0 = 0; p0 < k; p0 += KB) {
        i64 p1 = std::min(p0 + KB, k);
        for (int i = 0; i < width; ++i) {
            const T* s = d + (i0 + i) * x.row;
            if (i < present)
                for (i64 p = p0; p < p1; ++p) out[p * width + i] = load(s + p * x.col);
            else
                for (i64 p = p0; p < p1; ++p) out[p * width + i] = 0;
        }
    }
}

static void pack(const Matrix& x, i64 i0, i64 rows, i64 k, int width, float* out) {
    if (x.dtype == F32) pack<float>(x, i0, rows, k, width, out);
    else pack<bf16>(x, i0, rows, k, width, out);
}

// One MR x NR block of outputs: `leaves` chains of equal length, added by the balanced tree.
static void block(i64 k, i64 leaves, const float* a, const float* b, float c[MR][NR]) {
    float level[8][MR][NR];
    i64 step = k / leaves;
    for (i64 leaf = 0; leaf < leaves; ++leaf) {
        float(*top)[NR] = c;
        float part[MR][NR];
        if (leaves > 1) {
            std::memset(part, 0, sizeof part);
            top = part;
        }
        micro(step, a + leaf * step * MR, b + leaf * step * NR, &top[0][0], NR);
        if (leaves == 1) return;
        int d = 0;  // binary carry: a complete pair at depth d becomes one sum at depth d + 1
        for (i64 n = leaf; n & 1; n >>= 1, ++d)
            for (int i = 0; i < MR; ++i)
                for (int j = 0; j < NR; ++j) part[i][j] = level[d][i][j] + part[i][j];
        std::memcpy(leaf + 1 == leaves ? &c[0][0] : &level[d][0][0], part, sizeof part);
    }
}

// c[:, j0 : j0 + NR] = or continue a . b^T for one panel of b; a is packed.
static void panel(i64 m, i64 n, i64 k, i64 leaves, const float* a, const Matrix& b, i64 j0, float* c, i64 ldc,
                  int accumulate, Array<float>& buffer) {
    buffer.resize(k * NR);
    pack(b, j0, n, k, NR, buffer.data());
    int cols = int(std::min<i64>(NR, n - j0));
    for (i64 i0 = 0; i0 < m; i0 += MR) {
        float out[MR][NR] = {};
        int rows = int(std::min<i64>(MR, m - i0));
        if (accumulate)
            for (int i = 0; i < rows; ++i) std::memcpy(out[i], c + (i0 + i) * ldc + j0, cols * 4);
        block(k, leaves, a + i0 * k, buffer.data(), out);
        for (int i = 0; i < rows; ++i) std::memcpy(c + (i0 + i) * ldc + j0, out[i], cols * 4);
    }
}

// c[m, n] = a[m, k] . b[n, k]^T in fp32, each output a k-tree of `leaves` chains; `accumulate` continues from c.
static void gemm(i64 m, i64 n, i64 k, i64 leaves, Matrix a, Matrix b, float* c, i64 ldc, int accumulate, int threads) {
    Array<float> packed;
    packed.resize((m + MR - 1) / MR * MR * k);
    parallel((m + MR - 1) / MR, threads, [&](i64 i) { pack(a, i * MR, m, k, MR, packed.data() + i * MR * k); });
    parallel((n + NR - 1) / NR, threads, [&](i64 j) {
        thread_local Array<float> buffer;
        panel(m, n, k, leaves, packed.data(), b, j * NR, c, ldc, accumulate, buffer);
    });
}

// ---------------------------------------------------------------- elementwise

constexpr i64 BLOCK = 2048;  // schedule: elements per work item, so that they stay in L1 between passes

// Call f(row, first column, end column) over all elements, in blocks distributed over threads.
template <class F> static void blocks(i64 rows, i64 cols, int threads, F f) {
    i64 per_row = (cols + BLOCK - 1) / BLOCK, rows_at_once = std::max<i64>(BLOCK / std::max<i64>(cols, 1), 1);
    parallel((rows + rows_at_once - 1) / rows_at_once * per_row, threads, [&](i64 w) {
        i64 j0 = w % per_row * BLOCK, j1 = std::min(cols, j0 + BLOCK), r0 = w / per_row * rows_at_once;
        for (i64 r = r0; r < std::min(rows, r0 + rows_at_once); ++r) f(r, j0, j1);
    });
}

template <class T>
static void round_t(i64 rows, i64 cols, const float* x, i64 ldx, const float* bias, T* y, i64 y_row, i64 y_col,
                    int threads) {
    blocks(rows, cols, threads, [&](i64 r, i64 j0, i64 j1) {
        const float* p = x + r * ldx;
        T* o = y + r * y_row;
        if (y_col != 1)
            for (i64 j = j0; j < j1; ++j) store(o + j * y_col, bias ? p[j] + bias[j] : p[j]);
        else if (bias)
            for (i64 j = j0; j < j1; ++j) store(o + j, p[j] + bias[j]);
        else
            for (i64 j = j0; j < j1; ++j) store(o + j, p[j]);
    });
}

// y <- x (+ bias), rounded to y's type.
static void round(i64 rows, i64 cols, const float* x, i64 ldx, const float* bias, int dtype, void* y, i64 y_row,
                  i64 y_col, int threads) {
    if (dtype == F32) round_t(rows, cols, x, ldx, bias, (float*)y, y_row, y_col, threads);
    else if (dtype == BF16) round_t(rows, cols, x, ldx, bias, (bf16*)y, y_row, y_col, threads);
    else round_t(rows, cols, x, ldx, bias, (fp16*)y, y_row, y_col, threads);
}

// y <- a + b in fp32, rounded to their type.
template <class T> static void add_t(i64 n, const T* a, const T* b, T* y, int threads) {
    blocks(1, n, threads, [&](i64, i64 j0, i64 j1) {
        for (i64 j = j0; j < j1; ++j) store(y + j, load(a + j) + load(b + j));
    });
}

static void add(i64 n, int dtype, const void* a, const void* b, void* y, int threads) {
    if (dtype == F32) add_t(n, (const float*)a, (const float*)b, (float*)y, threads);
    else add_t(n, (const bf16*)a, (const bf16*)b, (bf16*)y, threads);
}

// ---------------------------------------------------------------- log-softmax

template <class T>
static void logits_t(i64 rows, i64 cols, const T* x, i64 ldx, Transform transform, float* z, i64 ldz, float* capped,
                     int threads) {
    blocks(rows, cols, threads, [&](i64 r, i64 j0, i64 j1) {
        const T* p = x + r * ldx;
        float* o = z + r * ldz;
        for (i64 j = j0; j < j1; ++j) o[j] = load(p + j);
        if (transform.bias)
            for (i64 j = j0; j < j1; ++j) o[j] += transform.bias[j];
        if (transform.cap) {
            float cap = *transform.cap;
            for (i64 j = j0; j < j1; ++j) o[j] = cap * float(std::tanh(double(o[j] / cap)));
            if (capped)
                for (i64 j = j0; j < j1; ++j) capped[r * cols + j] = o[j];
        }
        if (transform.scale) {
            float scale = *transform.scale;
            for (i64 j = j0; j < j1; ++j) o[j] *= scale;
        }
        if (transform.temperature) {
            float t = transform.temperature[r];
            for (i64 j = j0; j < j1; ++j) o[j] /= t;
        }
    });
}

// z <- the logits of the GEMM's output x; z may be x. `capped` [rows, cols] or null <- the values after soft-capping.
static void logits(i64 rows, i64 cols, int dtype, const void* x, i64 ldx, Transform transform, float* z, i64 ldz,
                   float* capped, int threads) {
    if (dtype == F32) logits_t(rows, cols, (const float*)x, ldx, transform, z, ldz, capped, threads);
    else logits_t(rows, cols, (const bf16*)x, ldx, transform, z, ldz, capped, threads);
}

// Transform g in place: gradient of the logits -> gradient of the GEMM's output.
static void logits_back(i64 rows, i64 cols, float* g, i64 ldg, Transform transform, const float* capped, int threads) {
    blocks(rows, cols, threads, [&](i64 r, i64 j0, i64 j1) {
        float* o = g + r * ldg;
        if (transform.temperature) {
            float t = transform.temperature[r];
            for (i64 j = j0; j < j1; ++j) o[j] /= t;
        }
        if (transform.scale) {
            float scale = *transform.scale;
            for (i64 j = j0; j < j1; ++j) o[j] *= scale;
        }
        if (transform.cap) {
            float cap = *transform.cap;
            for (i64 j = j0; j < j1; ++j) {
                float c = capped[r * cols + j] / cap;
                o[j] *= 1.f - c * c;
            }
        }
    });
}

// Merge per-tile statistics [rows, tiles] into rows: top <- the maximum, or `given_max`; s; and v unless u is null.
static void join(i64 rows, i64 tiles, const float* m, const int32_t* q, const int32_t* u, const float* given_max,
                 float* top, i64* s, i64* v, int threads) {
    const float inf = std::numeric_limits<float>::infinity();
    parallel(rows, threads, [&](i64 r) {
        const float* mr = m + r * tiles;
        float best = given_max ? given_max[r] : -inf;
        if (!given_max)
            for (i64 t = 0; t < tiles; ++t) best = mr[t] > best || mr[t] != mr[t] ? mr[t] : best;  // NaN propagates
        i64 sum = 0, weighted = 0;
        for (i64 t = 0; t < tiles; ++t) {
            double w = exp1(mr[t] == -inf ? -inf : mr[t] - best), count = q[r * tiles + t];
            double a = __builtin_rint(w * count * 65536.0);
            sum += a == a ? i64(a) : 0;  // NaN: the maximum and the result are then NaN too
            if (!u) continue;
            double gap = mr[t] == -inf ? 0.0 : double(best) - double(mr[t]);
            double b = __builtin_rint(w * (double(u[r * tiles + t]) + count * gap) * 65536.0);
            weighted += b == b ? i64(b) : 0;
        }
        if (top) top[r] = best;
        s[r] = sum;
        if (u) v[r] = weighted;
    });
}

template <class T>
static void log_probs_t(i64 rows, i64 cols, const T* z, i64 ldz, const float* temperature, const double* lse,
                        float* out, i64 ldo, int threads) {
    blocks(rows, cols, threads, [&](i64 r, i64 j0, i64 j1) {
        float t = temperature ? temperature[r] : 1.f;
        for (i64 j = j0; j < j1; ++j) out[r * ldo + j] = float(double(load(z + r * ldz + j) / t) - lse[r]);
    });
}

// out <- (z / temperature) - lse: an fp32 quotient, a double difference, rounded to fp32.
static void log_probs(i64 rows, i64 cols, int dtype, const void* z, i64 ldz, const float* temperature,
                      const double* lse, float* out, i64 ldo, int threads) {
    if (dtype == F32) log_probs_t(rows, cols, (const float*)z, ldz, temperature, lse, out, ldo, threads);
    else log_probs_t(rows, cols, (const bf16*)z, ldz, temperature, lse, out, ldo, threads);
}

// Per row and tile of z: m = max, q = sum of rint(2^23 exp(z - m)), u = sum of rint(2^23 exp(z - m) (m - z)).
// Adding 1 to a value in [0, 1] rounds it to a multiple of 2^-23 and leaves that multiple in the low bits.
static inline int32_t fixed(float v) { return int32_t(float_bits(v + 1.f)) - 0x3f800000; }

static void tile_stats(i64 rows, i64 cols, i64 tile, const float* z, i64 ldz, float* m, int32_t* q, int32_t* u,
                       i64 ld_out, int threads) {
    i64 tiles = (cols + tile - 1) / tile;
    parallel(rows, threads, [&](i64 r) {
        for (i64 t = 0; t < tiles; ++t) {
            const float* p = z + r * ldz + t * tile;
            i64 n = std::min(tile, cols - t * tile);
            float lanes[16];
            int nans = 0;
            for (int l = 0; l < 16; ++l) lanes[l] = -std::numeric_limits<float>::infinity();
            i64 j = 0;
            for (; j + 16 <= n; j += 16)
                for (int l = 0; l < 16; ++l) {
                    float v = p[j + l];
                    lanes[l] = v > lanes[l] ? v : lanes[l];
                    nans |= v != v;
                }
            for (; j < n; ++j) {
                lanes[0] = p[j] > lanes[0] ? p[j] : lanes[0];
                nans |= p[j] != p[j];
            }
            float top = lanes[0];
            for (int l = 1; l < 16; ++l) top = lanes[l] > top ? lanes[l] : top;
            if (nans) top = std::numeric_limits<float>::quiet_NaN();
            int32_t sq = 0, su = 0;
            if (top > -std::numeric_limits<float>::infinity() && top < std::numeric_limits<float>::infinity()) {
                for (j = 0; j < n; ++j) sq += fixed(exp1(p[j] - top));
                if (u)
                    for (j = 0; j < n; ++j) {
                        float e = exp1(p[j] - top);
                        su += fixed(e > 0.f ? e * (top - p[j]) : 0.f);
                    }
            }
            m[r * ld_out + t] = top;
            q[r * ld_out + t] = sq;
            if (u) u[r * ld_out + t] = su;
        }
    });
}

// z <- d(loss)/dz for logp of column[r] (-1: the target is not among these columns) and, unless null, the entropy.
static void logits_grad(i64 rows, i64 cols, float* z, i64 ldz, const float* lse, const float* entropy,
                        const float* g_logp, const float* g_entropy, const i64* column, int threads) {
    parallel(rows, threads, [&](i64 r) {
        float* p = z + r * ldz;
        float g = g_logp[r], a = lse[r];
        if (g_entropy) {
            float ge = g_entropy[r], h = entropy[r];
            for (i64 j = 0; j < cols; ++j) {
                float lp = p[j] - a, e = exp1(lp);
                p[j] = e > 0.f ? -(g * e) - ge * (e * (lp + h)) : 0.f;
            }
        } else {
            for (i64 j = 0; j < cols; ++j) p[j] = -(g * exp1(p[j] - a));
        }
        if (column[r] >= 0) p[column[r]] += g;
    });
}

// ---------------------------------------------------------------- rms_norm

template <class T>
// y <- x * rstd * w, with rstd = 1 / sqrt(mean(x^2) + eps); the squares are summed in 16 lanes.
static void rms_norm_t(i64 rows, i64 n, const T* x, i64 ldx, const float* w, float eps, T* y, float* rstd,
                       int threads) {
    parallel(rows, threads, [&](i64 r) {
        const T* p = x + r * ldx;
        float s[16] = {};
        i64 j = 0;
        for (; j + 16 <= n; j += 16)
            for (int l = 0; l < 16; ++l) { float v = load(p + j + l); s[l] = fma1(v, v, s[l]); }
        for (; j < n; ++j) { float v = load(p + j); s[j % 16] = fma1(v, v, s[j % 16]); }
        float rs = 1.f / std::sqrt(tree<16>(s) / float(n) + eps);
        if (rstd) rstd[r] = rs;
        for (j = 0; j < n; ++j) store(y + r * n + j, load(p + j) * rs * w[j]);
    });
}

// Return the effective weight: w, or 1 + w if zero_centered (stored in `memory`).
static const float* effective_weight(const float* w, i64 n, int zero_centered, Array<float>& memory) {
    if (!zero_centered) return w;
    DefaultRounding guard;
    memory.resize(n);
    for (i64 j = 0; j < n; ++j) memory[j] = w[j] + 1.f;
    return memory.data();
}

static void rms_norm(i64 rows, i64 n, int dtype, const void* x, i64 ldx, const float* w, int zero_centered, float eps,
                     void* y, float* rstd, int threads) {
    Array<float> memory;
    w = effective_weight(w, n, zero_centered, memory);
    if (dtype == F32) rms_norm_t(rows, n, (const float*)x, ldx, w, eps, (float*)y, rstd, threads);
    else rms_norm_t(rows, n, (const bf16*)x, ldx, w, eps, (bf16*)y, rstd, threads);
}

template <class T>
static void rms_norm_grad_t(i64 rows, i64 n, const T* dy, const T* x, const float* w, const float* rstd, T* dx,
                            float* dw, int threads) {
    parallel(rows, threads, [&](i64 r) {
        const T *p = x + r * n, *g = dy + r * n;
        float s[16] = {};
        i64 j = 0;
        for (; j + 16 <= n; j += 16)
            for (int l = 0; l < 16; ++l) s[l] = fma1(load(g + j + l) * w[j + l], load(p + j + l), s[l]);
        for (; j < n; ++j) s[j % 16] = fma1(load(g + j) * w[j], load(p + j), s[j % 16]);
        float rs = rstd[r], c = tree<16>(s) / float(n) * rs * rs;
        for (j = 0; j < n; ++j)
            store(dx + r * n + j, rs * fma1(-c, load(p + j), load(g + j) * w[j]));
    });
    i64 cols = 256;  // schedule: columns per work item of dw, a chain over rows per column
    parallel((n + cols - 1) / cols, threads, [&](i64 b) {
        i64 j0 = b * cols, j1 = std::min(n, j0 + cols);
        for (i64 r = 0; r < rows; ++r)
            for (i64 j = j0; j < j1; ++j) dw[j] = fma1(load(dy + r * n + j), load(x + r * n + j) * rstd[r], dw[j]);
    });
}

static void rms_norm_grad(i64 rows, i64 n, int dtype, const void* dy, const void* x, const float* w, int zero_centered,
                          const float* rstd, void* dx, float* dw, int threads) {
    Array<float> memory;
    w = effective_weight(w, n, zero_centered, memory);
    if (dtype == F32)
        rms_norm_grad_t(rows, n, (const float*)dy, (const float*)x, w, rstd, (float*)dx, dw, threads);
    else rms_norm_grad_t(rows, n, (const bf16*)dy, (const bf16*)x, w, rstd, (bf16*)dx, dw, threads);
}

// ---------------------------------------------------------------- rope, silu_mul

template <class T>
// Rotate the first `rotary` dimensions of each head; the others are copied.
static void rope_t(i64 tokens, i64 heads, i64 dim, i64 rotary, int inverse, const T* x, i64 row, i64 head,
                   const i64* positions, const float* table, T* y, int threads) {
    i64 half = rotary / 2;
    parallel(tokens, threads, [&](i64 t) {
        const float *cos = table + positions[t] * rotary, *sin = cos + half;
        for (i64 h = 0; h < heads; ++h) {
            const T* p = x + t * row + h * head;
            T* o = y + (t * heads + h) * dim;
            for (i64 j = 0; j < half; ++j) {
                float a = load(p + j), b = load(p + half + j), c = cos[j], s = inverse ? -sin[j] : sin[j];
                store(o + j, fma1(a, c, -(b * s)));
                store(o + half + j, fma1(b, c, a * s));
            }
            for (i64 j = rotary; j < dim; ++j) o[j] = p[j];
        }
    });
}

static void rope(i64 tokens, i64 heads, i64 dim, i64 rotary, int dtype, int inverse, const void* x, i64 row, i64 head,
                 const i64* positions, const float* table, void* y, int threads) {
    if (dtype == F32)
        rope_t(tokens, heads, dim, rotary, inverse, (const float*)x, row, head, positions, table, (float*)y, threads);
    else rope_t(tokens, heads, dim, rotary, inverse, (const bf16*)x, row, head, positions, table, (bf16*)y, threads);
}

template <class T>
// y <- silu(g) * u.
static void silu_mul_t(i64 rows, i64 n, const T* g, i64 ldg, const T* u, i64 ldu, T* y, int threads) {
    parallel(rows, threads, [&](i64 r) {
        for (i64 j = 0; j < n; ++j) {
            float v = load(g + r * ldg + j);
            store(y + r * n + j, v / (1.f + exp1(-v)) * load(u + r * ldu + j));
        }
    });
}

static void silu_mul(i64 rows, i64 n, int dtype, const void* g, i64 ldg, const void* u, i64 ldu, void* y, int threads) {
    if (dtype == F32) silu_mul_t(rows, n, (const float*)g, ldg, (const float*)u, ldu, (float*)y, threads);
    else silu_mul_t(rows, n, (const bf16*)g, ldg, (const bf16*)u, ldu, (bf16*)y, threads);
}

// out[r] <- sum of bits(x[r, j]) * w[j], modulo 2^64.
template <class T>
static void bit_sums_t(i64 rows, i64 n, const T* x, i64 ldx, const uint64_t* w, uint64_t* out, int threads) {
    parallel(rows, threads, [&](i64 r) {
        uint64_t sum = 0;
        for (i64 j = 0; j < n; ++j) sum += uint64_t{x[r * ldx + j]} * w[j];
        out[r] = sum;
    });
}

static void bit_sums(i64 rows, i64 n, int bytes, const void* x, i64 ldx, const i64* w, i64* out, int threads) {
    const uint64_t* weights = (const uint64_t*)w;
    if (bytes == 4) bit_sums_t(rows, n, (const uint32_t*)x, ldx, weights, (uint64_t*)out, threads);
    else bit_sums_t(rows, n, (const uint16_t*)x, ldx, weights, (uint64_t*)out, threads);
}

template <class T>
static void silu_mul_grad_t(i64 rows, i64 n, const T* g, i64 ldg, const T* u, i64 ldu, const T* dy, T* dg, i64 lddg,
                            T* du, i64 lddu, int threads) {
    parallel(rows, threads, [&](i64 r) {
        for (i64 j = 0; j < n; ++j) {
            float v = load(g + r * ldg + j), d = load(dy + r * n + j), s = 1.f / (1.f + exp1(-v));
            store(du + r * lddu + j, d * (v * s));
            store(dg + r * lddg + j, d * load(u + r * ldu + j) * (s * fma1(v, 1.f - s, 1.f)));
        }
    });
}

static void silu_mul_grad(i64 rows, i64 n, int dtype, const void* g, i64 ldg, const void* u, i64 ldu, const void* dy,
                          void* dg, i64 lddg, void* du, i64 lddu, int threads) {
    if (dtype == F32)
        silu_mul_grad_t(rows, n, (const float*)g, ldg, (const float*)u, ldu, (const float*)dy, (float*)dg, lddg,
                        (float*)du, lddu, threads);
    else
        silu_mul_grad_t(rows, n, (const bf16*)g, ldg, (const bf16*)u, ldu, (const bf16*)dy, (bf16*)dg, lddg, (bf16*)du,
                        lddu, threads);
}

template <class T>
// y <- sigmoid(gate) * x, one gate per row.
static void sigmoid_mul_t(i64 rows, i64 n, const float* gate, const T* x, T* y, int threads) {
    parallel(rows, threads, [&](i64 r) {
        float s = 1.f / (1.f + exp1(-gate[r]));
        for (i64 j = 0; j < n; ++j) store(y + r * n + j, s * load(x + r * n + j));
    });
}

static void sigmoid_mul(i64 rows, i64 n, int dtype, const float* gate, const void* x, void* y, int threads) {
    if (dtype == F32) sigmoid_mul_t(rows, n, gate, (const float*)x, (float*)y, threads);
    else sigmoid_mul_t(rows, n, gate, (const bf16*)x, (bf16*)y, threads);
}

// Sum of a[j] * b[j]: lane j mod 16 is a chain; the lanes are added by halving.
template <class A, class B> static inline float lane_sum(i64 n, const A* a, const B* b) {
    float s[16] = {};
    i64 j = 0;
    for (; j + 16 <= n; j += 16)
        for (int l = 0; l < 16; ++l) s[l] = fma1(load(a + j + l), load(b + j + l), s[l]);
    for (; j < n; ++j) s[j % 16] = fma1(load(a + j), load(b + j), s[j % 16]);
    return tree<16>(s);
}

template <class T>
static void sigmoid_mul_grad_t(i64 rows, i64 n, const float* gate, const T* x, const T* dy, float* dgate, T* dx,
                               int threads) {
    parallel(rows, threads, [&](i64 r) {
        float s = 1.f / (1.f + exp1(-gate[r]));
        dgate[r] = lane_sum(n, dy + r * n, x + r * n) * s * (1.f - s);
        for (i64 j = 0; j < n; ++j) store(dx + r * n + j, s * load(dy + r * n + j));
    });
}

static void sigmoid_mul_grad(i64 rows, i64 n, int dtype, const float* gate, const void* x, const void* dy, float* dgate,
                             void* dx, int threads) {
    if (dtype == F32) sigmoid_mul_grad_t(rows, n, gate, (const float*)x, (const float*)dy, dgate, (float*)dx, threads);
    else sigmoid_mul_grad_t(rows, n, gate, (const bf16*)x, (const bf16*)dy, dgate, (bf16*)dx, threads);
}

template <class T>
// y <- sigmoid(gate) * x, one gate per element.
static void sigmoid_mul_each_t(i64 rows, i64 n, const T* gate, i64 ldg, const T* x, i64 ldx, T* y, int threads) {
    parallel(rows, threads, [&](i64 r) {
        for (i64 j = 0; j < n; ++j)
            store(y + r * n + j, 1.f / (1.f + exp1(-load(gate + r * ldg + j))) * load(x + r * ldx + j));
    });
}

static void sigmoid_mul_each(i64 rows, i64 n, int dtype, const void* gate, i64 ldg, const void* x, i64 ldx, void* y,
                             int threads) {
    if (dtype == F32)
        sigmoid_mul_each_t(rows, n, (const float*)gate, ldg, (const float*)x, ldx, (float*)y, threads);
    else sigmoid_mul_each_t(rows, n, (const bf16*)gate, ldg, (const bf16*)x, ldx, (bf16*)y, threads);
}

template <class T>
static void sigmoid_mul_each_grad_t(i64 rows, i64 n, const T* gate, i64 ldg, const T* x, i64 ldx, const T* dy, T* dgate,
                                    T* dx, int threads) {
    parallel(rows, threads, [&](i64 r) {
        for (i64 j = 0; j < n; ++j) {
            float s = 1.f / (1.f + exp1(-load(gate + r * ldg + j))), d = load(dy + r * n + j);
            store(dgate + r * n + j, d * load(x + r * ldx + j) * s * (1.f - s));
            store(dx + r * n + j, s * d);
        }
    });
}

static void sigmoid_mul_each_grad(i64 rows, i64 n, int dtype, const void* gate, i64 ldg, const void* x, i64 ldx,
                                  const void* dy, void* dgate, void* dx, int threads) {
    if (dtype == F32)
        sigmoid_mul_each_grad_t(rows, n, (const float*)gate, ldg, (const float*)x, ldx, (const float*)dy, (float*)dgate,
                                (float*)dx, threads);
    else
        sigmoid_mul_each_grad_t(rows, n, (const bf16*)gate, ldg, (const bf16*)x, ldx, (const bf16*)dy, (bf16*)dgate,
                                (bf16*)dx, threads);
}

// ---------------------------------------------------------------- Gated DeltaNet, row by row

template <class T>
// y <- x * scale, with scale = 1 / sqrt(sum of x^2 + eps).
static void l2_norm_t(i64 rows, i64 n, const T* x, i64 ldx, float eps, T* y, float* scale, int threads) {
    parallel(rows, threads, [&](i64 r) {
        const T* p = x + r * ldx;
        float s = scale[r] = 1.f / std::sqrt(lane_sum(n, p, p) + eps);
        for (i64 j = 0; j < n; ++j) store(y + r * n + j, load(p + j) * s);
    });
}

static void l2_norm(i64 rows, i64 n, int dtype, const void* x, i64 ldx, float eps, void* y, float* scale, int threads) {
    if (dtype == F32) l2_norm_t(rows, n, (const float*)x, ldx, eps, (float*)y, scale, threads);
    else l2_norm_t(rows, n, (const bf16*)x, ldx, eps, (bf16*)y, scale, threads);
}

template <class T>
static void l2_norm_grad_t(i64 rows, i64 n, const T* dy, const T* x, i64 ldx, const float* scale, T* dx, int threads) {
    parallel(rows, threads, [&](i64 r) {
        const T *p = x + r * ldx, *g = dy + r * n;
        float s = scale[r], c = lane_sum(n, g, p) * s * s;
        for (i64 j = 0; j < n; ++j) store(dx + r * n + j, s * fma1(-c, load(p + j), load(g + j)));
    });
}

static void l2_norm_grad(i64 rows, i64 n, int dtype, const void* dy, const void* x, i64 ldx, const float* scale,
                         void* dx, int threads) {
    if (dtype == F32) l2_norm_grad_t(rows, n, (const float*)dy, (const float*)x, ldx, scale, (float*)dx, threads);
    else l2_norm_grad_t(rows, n, (const bf16*)dy, (const bf16*)x, ldx, scale, (bf16*)dx, threads);
}

template <class T>
// y <- ((x * rstd) * w) * silu(z), with RMSNorm's rstd.
static void gated_rms_norm_t(i64 rows, i64 n, const T* x, i64 ldx, const float* w, const T* z, i64 ldz, float eps, T* y,
                             float* rstd, int threads) {
    parallel(rows, threads, [&](i64 r) {
        const T *p = x + r * ldx, *q = z + r * ldz;
        float rs = rstd[r] = 1.f / std::sqrt(lane_sum(n, p, p) / float(n) + eps);
        for (i64 j = 0; j < n; ++j) {
            float v = load(q + j);
            store(y + r * n + j, load(p + j) * rs * w[j] * (v / (1.f + exp1(-v))));
        }
    });
}

static void gated_rms_norm(i64 rows, i64 n, int dtype, const void* x, i64 ldx, const float* w, const void* z, i64 ldz,
                           float eps, void* y, float* rstd, int threads) {
    if (dtype == F32)
        gated_rms_norm_t(rows, n, (const float*)x, ldx, w, (const float*)z, ldz, eps, (float*)y, rstd, threads);
    else gated_rms_norm_t(rows, n, (const bf16*)x, ldx, w, (const bf16*)z, ldz, eps, (bf16*)y, rstd, threads);
}

template <class T>
static void gated_rms_norm_grad_t(i64 rows, i64 n, const T* dy, const T* x, i64 ldx, const float* w, const T* z,
                                  i64 ldz, const float* rstd, T* dx, float* dw, T* dz, int threads) {
    Array<float> gated(rows * n);  // dy * silu(z)
    parallel(rows, threads, [&](i64 r) {
        const T *p = x + r * ldx, *q = z + r * ldz;
        float rs = rstd[r], *e = gated.data() + r * n, lanes[16] = {};
        for (i64 j = 0; j < n; ++j) {
            float v = load(q + j), d = load(dy + r * n + j), s = 1.f / (1.f + exp1(-v));
            store(dz + r * n + j, d * (load(p + j) * rs * w[j]) * (s * fma1(v, 1.f - s, 1.f)));
            e[j] = d * (v * s);
            lanes[j % 16] = fma1(e[j] * w[j], load(p + j), lanes[j % 16]);
        }
        float c = tree<16>(lanes) / float(n) * rs * rs;
        for (i64 j = 0; j < n; ++j) store(dx + r * n + j, rs * fma1(-c, load(p + j), e[j] * w[j]));
    });
    i64 cols = 256;  // schedule: columns per work item of dw, a chain over rows per column
    parallel((n + cols - 1) / cols, threads, [&](i64 b) {
        i64 j0 = b * cols, j1 = std::min(n, j0 + cols);
        for (i64 r = 0; r < rows; ++r)
            for (i64 j = j0; j < j1; ++j) dw[j] = fma1(gated[r * n + j], load(x + r * ldx + j) * rstd[r], dw[j]);
    });
}

static void gated_rms_norm_grad(i64 rows, i64 n, int dtype, const void* dy, const void* x, i64 ldx, const float* w,
                                const void* z, i64 ldz, const float* rstd, void* dx, float* dw, void* dz, int threads) {
    if (dtype == F32)
        gated_rms_norm_grad_t(rows, n, (const float*)dy, (const float*)x, ldx, w, (const float*)z, ldz, rstd,
                              (float*)dx, dw, (float*)dz, threads);
    else
        gated_rms_norm_grad_t(rows, n, (const bf16*)dy, (const bf16*)x, ldx, w, (const bf16*)z, ldz, rstd, (bf16*)dx,
                              dw, (bf16*)dz, threads);
}

constexpr float SOFTPLUS_LINEAR = 20;  // mirrors alignkit/ops/delta_gates/reference.py:LINEAR

// log(1 + exp(x)); log1p in double by the C library, rounded once.
static inline float softplus(float x) { return x > SOFTPLUS_LINEAR ? x : float(std::log1p(double(exp1(x)))); }

// -exp(a_log). In memory, so that the compiler cannot negate a product instead, which changes the sign of NaN.
struct Decays : Array<float> {
    Decays(i64 n, const float* a_log) : Array<float>(n) {
        DefaultRounding guard;
        for (i64 j = 0; j < n; ++j) (*this)[j] = -exp1(a_log[j]);
    }
};

template <class T>
// g <- -exp(a_log) * softplus(a + dt_bias), beta <- sigmoid(b).
static void delta_gates_t(i64 rows, i64 n, const T* a, i64 lda, const T* b, i64 ldb, const float* a_log,
                          const float* dt_bias, float* g, float* beta, int threads) {
    Decays factor(n, a_log);
    parallel(rows, threads, [&](i64 r) {
        for (i64 j = 0; j < n; ++j) {
            g[r * n + j] = factor[j] * softplus(load(a + r * lda + j) + dt_bias[j]);
            beta[r * n + j] = 1.f / (1.f + exp1(-load(b + r * ldb + j)));
        }
    });
}

static void delta_gates(i64 rows, i64 n, int dtype, const void* a, i64 lda, const void* b, i64 ldb, const float* a_log,
                        const float* dt_bias, float* g, float* beta, int threads) {
    if (dtype == F32)
        delta_gates_t(rows, n, (const float*)a, lda, (const float*)b, ldb, a_log, dt_bias, g, beta, threads);
    else delta_gates_t(rows, n, (const bf16*)a, lda, (const bf16*)b, ldb, a_log, dt_bias, g, beta, threads);
}

template <class T>
static void delta_gates_grad_t(i64 rows, i64 n, const float* dg, const float* dbeta, const T* a, i64 lda,
                               const float* a_log, const float* dt_bias, const float* g, const float* beta, T* da,
                               T* db, float* d_log, float* d_bias) {
    Decays factor(n, a_log);
    DefaultRounding guard;
    for (i64 r = 0; r < rows; ++r)
        for (i64 j = 0; j < n; ++j) {
            i64 i = r * n + j;
            float x = load(a + r * lda + j) + dt_bias[j], slope = x > SOFTPLUS_LINEAR ? 1.f : 1.f / (1.f + exp1(-x));
            float dx = dg[i] * factor[j] * slope;
            store(da + i, dx);
            store(db + i, dbeta[i] * beta[i] * (1.f - beta[i]));
            d_log[j] = fma1(dg[i], g[i], d_log[j]);
            d_bias[j] += dx;
        }
}

static void delta_gates_grad(i64 rows, i64 n, int dtype, const float* dg, const float* dbeta, const void* a, i64 lda,
                             const float* a_log, const float* dt_bias, const float* g, const float* beta, void* da,
                             void* db, float* d_log, float* d_bias) {
    if (dtype == F32)
        delta_gates_grad_t(rows, n, dg, dbeta, (const float*)a, lda, a_log, dt_bias, g, beta, (float*)da, (float*)db,
                           d_log, d_bias);
    else
        delta_gates_grad_t(rows, n, dg, dbeta, (const bf16*)a, lda, a_log, dt_bias, g, beta, (bf16*)da, (bf16*)db,
                           d_log, d_bias);
}

// A sequence's rows for the causal convolution: `before` holds the taps - 1 rows before the first one.
template <class T> struct Conv {
    i64 n, taps;
    const T* x;
    i64 ldx;
    const T* before;
    const float* w;  // [taps, n]

    const T* row(i64 r) const { return r < 0 ? before + (taps - 1 + r) * n : x + r * ldx; }

    // c <- the chain over the taps of row r, oldest first.
    void operator()(i64 r, float* c) const {
        for (i64 i = 0; i < n; ++i) c[i] = 0.f;
        for (i64 j = 0; j < taps; ++j) {
            const T* p = row(r - (taps - 1) + j);
            for (i64 i = 0; i < n; ++i) c[i] = fma1(load(p + i), w[j * n + i], c[i]);
        }
    }
};

// A filter [n, taps] as fp32 [taps, n].
template <class T> struct Filter : Array<float> {
    Filter(i64 n, i64 taps, const T* w) {
        this->resize(n * taps);
        for (i64 i = 0; i < n; ++i)
            for (i64 j = 0; j < taps; ++j) (*this)[j * n + i] = load(w + i * taps + j);
    }
};

// Call f(sequence, row in it) for each row of the packed sequences, distributed over threads.
template <class F> static void parallel_rows(i64 seqs, const i64* starts, int threads, F f) {
    i64 first = starts[0], rows = starts[seqs] - first;
    parallel(rows, threads, [&](i64 i) {
        i64 r = first + i, low = 0, high = seqs;  // starts[low] <= r < starts[high]
        while (high - low > 1) {
            i64 middle = (low + high) / 2;
            (starts[middle] <= r ? low : high) = middle;
        }
        f(low, r - starts[low]);
    });
}

template <class T>
static void short_conv_t(i64 seqs, i64 n, i64 taps, const T* x, i64 ldx, const T* weight, const i64* starts, T* y,
                         int threads) {
    Filter<T> w(n, taps, weight);
    Array<T> zero(n * taps, T());
    parallel_rows(seqs, starts, threads, [&](i64 s, i64 r) {
        Array<float> c(n);
        Conv<T>{n, taps, x + starts[s] * ldx, ldx, zero.data(), w.data()}(r, c.data());
        for (i64 i = 0; i < n; ++i) store(y + (starts[s] + r) * n + i, c[i] / (1.f + exp1(-c[i])));
    });
}

static void short_conv(i64 seqs, i64 n, i64 taps, int dtype, const void* x, i64 ldx, const void* weight,
                       const i64* starts, void* y, int threads) {
    if (dtype == F32)
        short_conv_t(seqs, n, taps, (const float*)x, ldx, (const float*)weight, starts, (float*)y, threads);
    else short_conv_t(seqs, n, taps, (const bf16*)x, ldx, (const bf16*)weight, starts, (bf16*)y, threads);
}

template <class T>
static void short_conv_grad_t(i64 seqs, i64 n, i64 taps, const T* dy, const T* x, i64 ldx, const T* weight,
                              const i64* starts, float* dc, T* dx, float* dw, int threads) {
    Filter<T> w(n, taps, weight);
    Array<T> zero(n * taps, T());
    auto conv = [&](i64 s) { return Conv<T>{n, taps, x + starts[s] * ldx, ldx, zero.data(), w.data()}; };
    parallel_rows(seqs, starts, threads, [&](i64 s, i64 r) {
        i64 at = (starts[s] + r) * n;
        conv(s)(r, dc + at);
        for (i64 i = 0; i < n; ++i) {
            float c = dc[at + i], g = 1.f / (1.f + exp1(-c));
            dc[at + i] = load(dy + at + i) * (g * fma1(c, 1.f - g, 1.f));
        }
    });
    Array<float> none(n, 0.f);
    parallel_rows(seqs, starts, threads, [&](i64 s, i64 r) {
        Array<float> acc(n, 0.f);
        i64 rows = starts[s + 1] - starts[s];
        for (i64 k = 0; k < taps; ++k) {
            const float* d = r + k < rows ? dc + (starts[s] + r + k) * n : none.data();
            for (i64 i = 0; i < n; ++i) acc[i] = fma1(d[i], w[(taps - 1 - k) * n + i], acc[i]);
        }
        for (i64 i = 0; i < n; ++i) store(dx + (starts[s] + r) * n + i, acc[i]);
    });
    i64 cols = 64;  // schedule: channels per work item of dw, a chain over rows per filter element
    parallel((n + cols - 1) / cols, threads, [&](i64 b) {
        i64 c0 = b * cols, c1 = std::min(n, c0 + cols);
        for (i64 s = 0; s < seqs; ++s)
            for (i64 r = 0; r < starts[s + 1] - starts[s]; ++r)
                for (i64 j = 0; j < taps; ++j) {
                    const T* p = conv(s).row(r - (taps - 1) + j);
                    const float* d = dc + (starts[s] + r) * n;
                    for (i64 i = c0; i < c1; ++i) dw[i * taps + j] = fma1(d[i], load(p + i), dw[i * taps + j]);
                }
    });
}

static void short_conv_grad(i64 seqs, i64 n, i64 taps, int dtype, const void* dy, const void* x, i64 ldx,
                            const void* weight, const i64* starts, float* dc, void* dx, float* dw, int threads) {
    if (dtype == F32)
        short_conv_grad_t(seqs, n, taps, (const float*)dy, (const float*)x, ldx, (const float*)weight, starts, dc,
                          (float*)dx, dw, threads);
    else
        short_conv_grad_t(seqs, n, taps, (const bf16*)dy, (const bf16*)x, ldx, (const bf16*)weight, starts, dc,
                          (bf16*)dx, dw, threads);
}

template <class T>
// short_conv of the new rows of each sequence; `state` [slots, taps - 1, n] holds the rows before them, and then the
// last rows.
static void paged_short_conv_t(i64 seqs, i64 n, i64 taps, const T* x, i64 ldx, const T* weight, const i64* starts,
                               const i64* lens, T* state, i64 slot_stride, i64 row_stride, const i64* slots, T* y,
                               int threads) {
    i64 last = taps - 1;
    Filter<T> w(n, taps, weight);
    Array<T> before(seqs * last * n, T());
    for (i64 s = 0; s < seqs; ++s) {
        i64 rows = starts[s + 1] - starts[s], cached = std::min(last, lens[s] - rows);
        for (i64 j = last - cached; rows && j < last; ++j)
            std::memcpy(before.data() + (s * last + j) * n, state + slots[s] * slot_stride + j * row_stride,
                        n * sizeof(T));
    }
    auto conv = [&](i64 s) {
        return Conv<T>{n, taps, x + starts[s] * ldx, ldx, before.data() + s * last * n, w.data()};
    };
    parallel_rows(seqs, starts, threads, [&](i64 s, i64 r) {
        Array<float> c(n);
        conv(s)(r, c.data());
        for (i64 i = 0; i < n; ++i) store(y + (starts[s] + r) * n + i, c[i] / (1.f + exp1(-c[i])));
    });
    for (i64 s = 0; s < seqs; ++s) {
        i64 rows = starts[s + 1] - starts[s];
        for (i64 j = 0; rows && j < last; ++j)
            std::memcpy(state + slots[s] * slot_stride + j * row_stride, conv(s).row(rows - last + j), n * sizeof(T));
    }
}

static void paged_short_conv(i64 seqs, i64 n, i64 taps, int dtype, const void* x, i64 ldx, const void* weight,
                             const i64* starts, const i64* lens, void* state, i64 slot_stride, i64 row_stride,
                             const i64* slots, void* y, int threads) {
    if (dtype == F32)
        paged_short_conv_t(seqs, n, taps, (const float*)x, ldx, (const float*)weight, starts, lens, (float*)state,
                           slot_stride, row_stride, slots, (float*)y, threads);
    else
        paged_short_conv_t(seqs, n, taps, (const bf16*)x, ldx, (const bf16*)weight, starts, lens, (bf16*)state,
                           slot_stride, row_stride, slots, (bf16*)y, threads);
}

// ---------------------------------------------------------------- gated delta rule

constexpr i64 CHUNK = 16;  // mirrors alignkit/ops/delta_rule/layout.py:CHUNK

// The state of a head: `s` [K, V] before the open chunk, and that chunk's rows (ops/delta_rule/layout.py).
template <class T> struct DeltaHead {
    i64 K, V;
    float* s;
    T *k, *r;
    float *g, *d;
    Array<float> rounded, keys, sides, u, x, y, weights;

    DeltaHead(i64 K, i64 V, float* s, T* k, T* r, float* g, float* d)
        : K(K), V(V), s(s), k(k), r(r), g(g), d(d), rounded(K * V), keys(K * CHUNK, 0.f), sides(CHUNK * V),
          u(CHUNK * V), x(V), y(V), weights(CHUNK) {}

    // Read the first `rows` rows of the open chunk.
    void open(i64 rows) {
        for (i64 i = 0; i < rows; ++i) {
            for (i64 c = 0; c < K; ++c) keys[c * CHUNK + i] = load(k + i * K + c);
            for (i64 c = 0; c < V; ++c) sides[i * V + c] = load(r + i * V + c);
        }
        for (i64 i = 0; i < rows; ++i) solve(i);
        round_state();
    }

    void round_state() {
        for (i64 i = 0; i < K * V; ++i) rounded[i] = round_to<T>(s[i]);
    }

    // u of row i from the rows of D and R.
    void solve(i64 i) {
        float* p = u.data() + i * V;
        for (i64 c = 0; c < V; ++c) p[c] = 0.f;
        for (i64 j = 0; j <= i; ++j) {
            float factor = round_to<T>(d[i * CHUNK + j]);
            for (i64 c = 0; c < V; ++c) p[c] = fma1(factor, sides[j * V + c], p[c]);
        }
        for (i64 c = 0; c < V; ++c) p[c] = round_to<T>(p[c] + 0.f);
    }

    // out <- a . T(S), a chain over K.
    void times_state(const T* a, float* out) {
        for (i64 c = 0; c < V; ++c) out[c] = 0.f;
        for (i64 i = 0; i < K; ++i) {
            float f = load(a + i);
            for (i64 c = 0; c < V; ++c) out[c] = fma1(f, rounded[i * V + c], out[c]);
        }
    }

    // out[i] <- a . k_i for all rows of the chunk.
    void times_keys(const T* a, float* out) {
        for (i64 i = 0; i < CHUNK; ++i) out[i] = 0.f;
        for (i64 c = 0; c < K; ++c) {
            float f = load(a + c);
            for (i64 i = 0; i < CHUNK; ++i) out[i] = fma1(f, keys[c * CHUNK + i], out[i]);
        }
    }

    // Append a row as number `at` of the open chunk.
    void append(i64 at, const T* q, const T* key, const T* v, float gate, float beta, float scale, T* out) {
        for (i64 c = 0; c < K; ++c) {
            k[at * K + c] = key[c];
            keys[c * CHUNK + at] = load(key + c);
        }
        g[at] = (at ? g[at - 1] : 0.f) + gate;
        float grown = exp1(g[at]), *row = d + at * CHUNK, lower[CHUNK];
        times_keys(key, lower);
        for (i64 i = 0; i < at; ++i) lower[i] = beta * (exp1(g[at] - g[i]) * lower[i]);
        for (i64 i = 0; i < CHUNK; ++i) row[i] = i == at ? 1.f : 0.f;
        for (i64 i = 0; i < at; ++i)
            for (i64 c = 0; c <= i; ++c) row[c] = fma1(-lower[i], d[i * CHUNK + c], row[c]);
        times_state(key, x.data());
        for (i64 c = 0; c < V; ++c) {
            store(r + at * V + c, beta * (load(v + c) - grown * x[c]) + 0.f);
            sides[at * V + c] = load(r + at * V + c);
        }
        solve(at);
        times_state(q, y.data());
        times_keys(q, weights.data());
        for (i64 c = 0; c < V; ++c) y[c] = grown * y[c];
        for (i64 i = 0; i <= at; ++i) {
            float f = round_to<T>(exp1(g[at] - g[i]) * weights[i]);
            for (i64 c = 0; c < V; ++c) y[c] = fma1(f, u[i * V + c], y[c]);
        }
        for (i64 c = 0; c < V; ++c) store(out + c, scale * y[c] + 0.f);
        if (at == CHUNK - 1) close();
    }

    // Add the complete chunk to the state.
    void close() {
        float last = g[CHUNK - 1], decay = exp1(last);
        for (i64 i = 0; i < CHUNK; ++i) {
            float f = exp1(last - g[i]);
            for (i64 c = 0; c < V; ++c) u[i * V + c] = round_to<T>(u[i * V + c] * f);
        }
        for (i64 a = 0; a < K; ++a) {
            float* p = s + a * V;
            for (i64 c = 0; c < V; ++c) p[c] = decay * p[c];
            for (i64 i = 0; i < CHUNK; ++i)
                for (i64 c = 0; c < V; ++c) p[c] = fma1(keys[a * CHUNK + i], u[i * V + c], p[c]);
        }
        round_state();
    }
};

// Rows of packed sequences: q and k [rows, heads_k, K], v and out [rows, heads_v, V], g and beta [rows, heads_v].
template <class T> struct DeltaRows {
    i64 heads_v, heads_k, K, V;
    const T *q, *k, *v;
    const float *g, *beta;
    float scale;
    T* out;

    // Append rows low to high - 1 to a head whose first of them has `position` in the sequence.
    void append(DeltaHead<T>& head, i64 h, i64 position, i64 low, i64 high) const {
        i64 kh = h / (heads_v / heads_k);
        head.open(position % CHUNK);
        for (i64 r = low; r < high; ++r) {
            i64 a = (r * heads_k + kh) * K, b = (r * heads_v + h) * V, c = r * heads_v + h;
            head.append((position + r - low) % CHUNK, q + a, k + a, v + b, g[c], beta[c], scale, out + b);
        }
    }
};

template <class T>
static void delta_rule_t(i64 seqs, const DeltaRows<T>& rows, const i64* starts, int threads) {
    i64 K = rows.K, V = rows.V;
    parallel(seqs * rows.heads_v, threads, [&](i64 item) {
        i64 i = item / rows.heads_v;
        if (starts[i] == starts[i + 1]) return;
        Array<float> s(K * V, 0.f), g(CHUNK), d(CHUNK * CHUNK);
        Array<T> k(CHUNK * K), r(CHUNK * V);
        DeltaHead<T> head(K, V, s.data(), k.data(), r.data(), g.data(), d.data());
        rows.append(head, item % rows.heads_v, 0, starts[i], starts[i + 1]);
    });
}

static void delta_rule(i64 seqs, i64 heads_v, i64 heads_k, i64 K, i64 V, int dtype, const void* q, const void* k,
                       const void* v, const float* g, const float* beta, const i64* starts, float scale, void* out,
                       int threads) {
    if (dtype == F32)
        delta_rule_t(seqs, DeltaRows<float>{heads_v, heads_k, K, V, (const float*)q, (const float*)k, (const float*)v,
                                            g, beta, scale, (float*)out}, starts, threads);
    else
        delta_rule_t(seqs, DeltaRows<bf16>{heads_v, heads_k, K, V, (const bf16*)q, (const bf16*)k, (const bf16*)v, g,
                                           beta, scale, (bf16*)out}, starts, threads);
}

template <class T>
// delta_rule of the new rows of each sequence, whose pages hold a head's state in `head_stride` fp32 words.
static void paged_delta_rule_t(i64 seqs, const DeltaRows<T>& rows, const i64* starts, const i64* lens, float* pages,
                               i64 page_stride, i64 head_stride, const i64* slots, int threads) {
    i64 K = rows.K, V = rows.V;
    parallel(seqs * rows.heads_v, threads, [&](i64 item) {
        i64 i = item / rows.heads_v, h = item % rows.heads_v, n = starts[i + 1] - starts[i];
        if (!n) return;
        float* s = pages + slots[i] * page_stride + h * head_stride;
        if (lens[i] == n)
            for (i64 j = 0; j < K * V; ++j) s[j] = 0.f;
        T *k = (T*)(s + K * V), *r = k + CHUNK * K;
        float *g = (float*)(r + CHUNK * V), *d = g + CHUNK;
        DeltaHead<T> head(K, V, s, k, r, g, d);
        rows.append(head, h, lens[i] - n, starts[i], starts[i + 1]);
    });
}

static void paged_delta_rule(i64 seqs, i64 heads_v, i64 heads_k, i64 K, i64 V, int dtype, const void* q, const void* k,
                             const void* v, const float* g, const float* beta, const i64* starts, const i64* lens,
                             float scale, float* pages, i64 page_stride, i64 head_stride, const i64* slots, void* out,
                             int threads) {
    if (dtype == F32)
        paged_delta_rule_t(seqs, DeltaRows<float>{heads_v, heads_k, K, V, (const float*)q, (const float*)k,
                                                  (const float*)v, g, beta, scale, (float*)out},
                           starts, lens, pages, page_stride, head_stride, slots, threads);
    else
        paged_delta_rule_t(seqs, DeltaRows<bf16>{heads_v, heads_k, K, V, (const bf16*)q, (const bf16*)k,
                                                 (const bf16*)v, g, beta, scale, (bf16*)out},
                           starts, lens, pages, page_stride, head_stride, slots, threads);
}

// ---------------------------------------------------------------- mixture of experts

// Leaf numbering of the tree over experts: `groups` runs of `run` ids (odd), each padded to `width`, a power of two.
struct ExpertTree {
    i64 run, groups, width;
    explicit ExpertTree(i64 experts) : groups(experts & -experts), width(1) {
        run = experts / groups;
        while (width < run) width *= 2;
    }
    i64 leaf(i64 expert) const { return expert / run * width + expert % run; }
    i64 leaves() const { return groups * width; }
};

// Sum v over experts by the tree: all, or those flagged in `chosen`. Never returns -0. `memory`: scratch for the
// leaves.
static float sum_over_experts(const ExpertTree& tree, i64 experts, const float* v, const char* chosen, float* memory) {
    for (i64 i = 0; i < tree.leaves(); ++i) memory[i] = 0.f;
    for (i64 e = 0; e < experts; ++e)
        if (!chosen || chosen[e]) memory[tree.leaf(e)] = v[e];
    for (i64 n = tree.leaves(); n > 1; n /= 2)
        for (i64 i = 0; i < n / 2; ++i) memory[i] = memory[2 * i] + memory[2 * i + 1];
    return memory[0] + 0.f;
}

// Argmax of v over entries not excluded (at least one): NaN is greatest, ties go to the lowest index.
static i64 best(i64 n, const float* v, const char* excluded) {
    i64 index = 0;
    while (excluded[index]) ++index;
    for (i64 i = index + 1; i < n; ++i)
        if (!excluded[i] && (v[i] > v[index] || (v[i] != v[i] && v[index] == v[index]))) index = i;
    return index;
}

// Scratch memory for routing one row.
struct Row {
    Array<float> scores, values, leaves, groups;
    Array<char> flags, group_flags;
    Row(const Routing& routing, const ExpertTree& tree)
        : scores(routing.experts), values(routing.experts), leaves(tree.leaves()), groups(routing.groups),
          flags(routing.experts), group_flags(routing.groups) {}
};

// s <- scores of the router logits z: sigmoid(z), or exp(z - max z).
static void scores(const Routing& routing, const float* z, float* s) {
    if (routing.sigmoid) {
        for (i64 e = 0; e < routing.experts; ++e) s[e] = 1.f / (1.f + exp1(-z[e]));
        return;
    }
    float top = z[0];
    for (i64 e = 1; e < routing.experts; ++e) top = z[e] > top || z[e] != z[e] ? z[e] : top;  // NaN propagates
    for (i64 e = 0; e < routing.experts; ++e) s[e] = exp1(z[e] - top);
}

// Return the divisor that turns scores into weights; chosen: a flag per expert.
static float divisor(const Routing& routing, const ExpertTree& tree, const float* s, const char* chosen,
                     float* memory) {
    if (routing.sigmoid && !routing.normalize) return 1.f;
    float sum = sum_over_experts(tree, routing.experts, s, routing.normalize ? chosen : nullptr, memory);
    return routing.sigmoid ? sum + 1e-20f : sum;
}

// Select the top_k experts by `values`, within the best top_groups groups; row.flags <- 1 for selected experts, else 0.
static void choose(const Routing& routing, const float* values, Row& row) {
    i64 size = routing.experts / routing.groups;
    char* flags = row.flags.data();  // nonzero: excluded; 2: selected
    for (i64 e = 0; e < routing.experts; ++e) flags[e] = routing.groups > 1;
    if (routing.groups > 1) {
        for (i64 g = 0; g < routing.groups; ++g) {
            const float* v = values + g * size;
            char* group = flags + g * size;
            for (i64 e = 0; e < size; ++e) group[e] = 0;
            i64 first = best(size, v, group);
            row.groups[g] = v[first];
            if (size > 1) {
                group[first] = 1;
                row.groups[g] = v[first] + v[best(size, v, group)];
            }
            for (i64 e = 0; e < size; ++e) group[e] = 1;
            row.group_flags[g] = 0;
        }
        for (i64 i = 0; i < routing.top_groups; ++i) {
            i64 g = best(routing.groups, row.groups.data(), row.group_flags.data());
            row.group_flags[g] = 1;
            for (i64 e = 0; e < size; ++e) flags[g * size + e] = 0;
        }
    }
    for (i64 i = 0; i < routing.top_k; ++i) flags[best(routing.experts, values, flags)] = 2;
    for (i64 e = 0; e < routing.experts; ++e) flags[e] = flags[e] == 2;
}

// weights, ids [rows, top_k] <- each row's selected experts, ascending ids.
static void route(i64 rows, Routing routing, const float* z, const float* bias, float* weights, i64* ids, int threads) {
    ExpertTree tree(routing.experts);
    parallel(rows, threads, [&](i64 r) {
        Row row(routing, tree);
        float* s = row.scores.data();
        scores(routing, z + r * routing.experts, s);
        const float* values = routing.sigmoid ? s : z + r * routing.experts;
        if (bias) {
            for (i64 e = 0; e < routing.experts; ++e) row.values[e] = values[e] + bias[e];
            values = row.values.data();
        }
        choose(routing, values, row);
        float total = divisor(routing, tree, s, row.flags.data(), row.leaves.data());
        for (i64 e = 0, i = r * routing.top_k; e < routing.experts; ++e)
            if (row.flags[e]) {
                ids[i] = e;
                weights[i++] = s[e] / total * routing.scale;
            }
    });
}

// dz [rows, experts] <- the gradient of the router logits from that of the weights.
static void route_grad(i64 rows, Routing routing, const float* z, const i64* ids, const float* grad, float* dz,
                       int threads) {
    ExpertTree tree(routing.experts);
    parallel(rows, threads, [&](i64 r) {
        Row row(routing, tree);
        float *s = row.scores.data(), *terms = row.values.data(), *g = dz + r * routing.experts;
        char* chosen = row.flags.data();
        scores(routing, z + r * routing.experts, s);
        for (i64 e = 0; e < routing.experts; ++e) g[e] = chosen[e] = 0;
        for (i64 i = r * routing.top_k; i < (r + 1) * routing.top_k; ++i) {
            g[ids[i]] = grad[i] * routing.scale;
            chosen[ids[i]] = 1;
        }
        float total = divisor(routing, tree, s, chosen, row.leaves.data()), shared = 0.f;
        bool divided = routing.normalize || !routing.sigmoid;
        if (divided) {
            for (i64 e = 0; e < routing.experts; ++e) terms[e] = s[e] / total * g[e];
            shared = sum_over_experts(tree, routing.experts, terms, chosen, row.leaves.data());
        }
        for (i64 e = 0; e < routing.experts; ++e) {
            float d = divided ? g[e] - shared : g[e];
            if (routing.sigmoid) g[e] = chosen[e] ? (divided ? d / total : d) * s[e] * (1.f - s[e]) : 0.f;
            else g[e] = chosen[e] || !routing.normalize ? s[e] / total * d : 0.f;
        }
    });
}

// out <- the sum over experts, by the tree, of weights (1 if null) times rows of y. place[row][i]: the row of y for
// expert ids[row][i], or -1 if absent.
template <class T, class O>
static void combine_t(i64 rows, i64 cols, i64 k, i64 experts, const T* y, const i64* place, const i64* ids,
                      const float* weights, O* out, int threads) {
    ExpertTree tree(experts);
    i64 block = std::min(cols, BLOCK);
    parallel(rows, threads, [&](i64 r) {
        Array<float> parts(k * block);
        Array<i64> leaf(k), pair(k), left(k), right(k), alive(k);
        Array<float> weight(k);
        i64 n = 0, sums = 0;
        for (i64 i = r * k; i < (r + 1) * k; ++i) {
            if (place[i] < 0) continue;
            i64 slot = n++, own_leaf = tree.leaf(ids[i]);
            for (; slot > 0 && leaf[slot - 1] > own_leaf; --slot) {  // insertion sort by leaf
                leaf[slot] = leaf[slot - 1];
                pair[slot] = pair[slot - 1];
                weight[slot] = weight[slot - 1];
            }
            leaf[slot] = own_leaf;
            pair[slot] = place[i];
            weight[slot] = weights ? weights[i] : 1.f;
        }
        for (i64 i = 0; i < n; ++i) alive[i] = i;
        for (i64 level = 1, m = n; m > 1; ++level) {  // add the children of each node; absent leaves are 0
            i64 remaining = 0;
            for (i64 i = 0; i < m; ++i) {
                if (remaining && leaf[alive[remaining - 1]] >> level == leaf[alive[i]] >> level) {
                    left[sums] = alive[remaining - 1];
                    right[sums++] = alive[i];
                } else alive[remaining++] = alive[i];
            }
            m = remaining;
        }
        for (i64 j0 = 0; j0 < cols; j0 += block) {
            i64 width = std::min(block, cols - j0);
            O* o = out + r * cols + j0;
            for (i64 i = 0; i < n; ++i) {
                const T* p = y + pair[i] * cols + j0;
                float *term = parts.data() + i * block, w = weight[i];
                for (i64 j = 0; j < width; ++j) term[j] = w * load(p + j);
            }
            for (i64 i = 0; i < sums; ++i) {
                float* a = parts.data() + left[i] * block;
                const float* b = parts.data() + right[i] * block;
                for (i64 j = 0; j < width; ++j) a[j] += b[j];
            }
            for (i64 j = 0; j < width; ++j) store(o + j, n ? parts[j] + 0.f : 0.f);
        }
    });
}

static void combine(i64 rows, i64 cols, i64 k, i64 experts, int dtype, const void* y, const i64* place, const i64* ids,
                    const float* weights, int out_dtype, void* out, int threads) {
    if (dtype == F32)
        combine_t(rows, cols, k, experts, (const float*)y, place, ids, weights, (float*)out, threads);
    else if (out_dtype == F32)
        combine_t(rows, cols, k, experts, (const bf16*)y, place, ids, weights, (float*)out, threads);
    else combine_t(rows, cols, k, experts, (const bf16*)y, place, ids, weights, (bf16*)out, threads);
}

template <class T>
static void weigh_t(i64 rows, i64 n, const float* g, const T* a, const float* w, float* dw, T* wg, T* wa, int threads) {
    parallel(rows, threads, [&](i64 r) {
        dw[r] = lane_sum(n, g + r * n, a + r * n) + 0.f;
        for (i64 j = r * n; j < (r + 1) * n; ++j) store(wg + j, w[r] * g[j]);
        for (i64 j = r * n; j < (r + 1) * n; ++j) store(wa + j, w[r] * load(a + j));
    });
}

// Backward of weights w, one row per (token, expert) pair: dw <- sum of g * a; wg <- w * g and wa <- w * a, in a's
// type.
static void weigh(i64 rows, i64 n, int dtype, const float* g, const void* a, const float* w, float* dw, void* wg,
                  void* wa, int threads) {
    if (dtype == F32) weigh_t(rows, n, g, (const float*)a, w, dw, (float*)wg, (float*)wa, threads);
    else weigh_t(rows, n, g, (const bf16*)a, w, dw, (bf16*)wg, (bf16*)wa, threads);
}

// ---------------------------------------------------------------- attention

constexpr i64 KB = NR;         // positions per key block
constexpr i64 LEAF = 128;      // mirrors alignkit/runtime/families.py:CPU.kv_leaf (positions, a multiple of KB)
constexpr float RESERVE = 21;  // mirrors alignkit/runtime/families.py:CPU.reserve (headroom above the level m)
constexpr i64 QB = 16;         // schedule: query positions per work item

// Row of k and v that holds position `pos` of sequence s.
static inline i64 kv_row(const Attention& p, i64 s, i64 pos) {
    i64 index = p.kv_start[s] + pos;
    return p.kv_rows ? p.kv_rows[index] : index;
}

struct Item { i64 seq, q0, q1; };  // query positions [q0, q1) within the sequence's queries

// One work item: QB query positions of all heads of a GQA group. Leaves of LEAF keys are visited in ascending order,
// and their softmax states merged into the running state as they complete.
template <class T>
static void attention_t(const Attention& p, T* out, float* m_out, float* l_out) {
    const T *q = (const T*)p.q, *k = (const T*)p.k, *v = (const T*)p.v;
    i64 group = p.heads_q / p.heads_kv, D = p.dim, DP = (D + NR - 1) / NR * NR;
    i64 tiles = 0;
    for (i64 s = 0; s < p.seqs; ++s) tiles += (p.q_start[s + 1] - p.q_start[s] + QB - 1) / QB;
    Array<Item> items(tiles);
    for (i64 s = 0, slot = tiles; s < p.seqs; ++s)  // longest first: late queries attend to more keys
        for (i64 a = 0, n = p.q_start[s + 1] - p.q_start[s]; a < n; a += QB)
            items[--slot] = {s, a, std::min(a + QB, n)};
    parallel(tiles * p.heads_kv, p.threads, [&](i64 w) {
        Item it = items[w / p.heads_kv];
        i64 hk = w % p.heads_kv, s = it.seq;
        i64 q_len = p.q_start[s + 1] - p.q_start[s], context = p.kv_start[s + 1] - p.kv_start[s] - q_len;
        i64 rows = (it.q1 - it.q0) * group, padded = (rows + MR - 1) / MR * MR;
        Array<float> qp(padded * D), kt(D * KB), vb(DP * KB), sc, pt(padded * KB);
        Array<float> m, l, acc;              // state of the current leaf; probabilities are exp(score - m)
        Array<float> m_all, l_all, acc_all;  // merged state of the leaves so far
        auto position = [&](i64 r) { return context + it.q0 + r / group; };
        for (i64 r = 0; r < padded; ++r)
            for (i64 d = 0; d < D; ++d)
                qp[(r / MR * D + d) * MR + r % MR] =
                    r < rows ? load(q + (p.q_start[s] + it.q0 + r / group) * p.q_row +
                                    (hk * group + r % group) * p.q_head + d)
                             : 0.f;
        i64 last = context + it.q1;  // keys visible to the last query
        for (i64 b = 0; b < last; b += KB) {
            if (b % LEAF == 0) {
                m.assign(padded, 0.f);
                l.assign(padded, 0.f);
                acc.assign(padded * DP, 0.f);
            }
            i64 present = std::min(KB, last - b), visible = position(0) + 1 - b;  // keys; keys that query 0 sees
            i64 nonfinite = -1;  // last key whose value has inf or NaN and that some query masks
            for (i64 j = 0; j < KB; ++j) {
                i64 row = j < present ? kv_row(p, s, b + j) : 0;
                const T *kr = k + row * p.k_row + hk * p.k_head, *vr = v + row * p.v_row + hk * p.v_head;
                for (i64 d = 0; d < D; ++d) kt[d * KB + j] = j < present ? load(kr + d) : 0.f;
                for (i64 d = 0; d < DP; ++d)
                    vb[(d / NR * KB + j) * NR + d % NR] = j < present && d < D ? load(vr + d) : 0.f;
                if (j >= visible && j < present)
                    for (i64 d = 0; d < D; ++d)
                        if ((float_bits(load(vr + d)) & 0x7f800000) == 0x7f800000) nonfinite = j;
            }
            sc.assign(padded * KB, 0.f);
            for (i64 r0 = 0; r0 < padded; r0 += MR) micro(D, &qp[r0 * D], kt.data(), &sc[r0 * KB], KB);
            for (i64 r = 0; r < padded; ++r) {
                float* sr = &sc[r * KB];
                float* pr = &pt[r / MR * MR * KB + r % MR];
                i64 visible = r < rows ? std::min(KB, position(r) + 1 - b) : 0;
                if (visible <= 0) {  // fully masked: the state does not change
                    for (i64 j = 0; j < KB; ++j) pr[j * MR] = 0.f;
                    continue;
                }
                float top = -std::numeric_limits<float>::infinity();
                for (i64 j = 0; j < KB; ++j) {
                    sr[j] = j < visible ? sr[j] * p.scale : -std::numeric_limits<float>::infinity();
                    top = sr[j] > top ? sr[j] : top;
                }
                if (b % LEAF == 0) m[r] = sr[0] + RESERVE;
                if (round_to<T>(exp1(top - m[r])) >= 2) {
                    float alpha = exp1(m[r] - (top + RESERVE));
                    m[r] = top + RESERVE;
                    l[r] *= alpha;
                    for (i64 d = 0; d < DP; ++d) acc[r * DP + d] *= alpha;
                }
                for (i64 j = 0; j < KB; ++j) sr[j] = exp1(sr[j] - m[r]);
                for (i64 j = 0; j < KB; ++j) l[r] += pr[j * MR] = round_to<T>(sr[j]);
            }
            for (i64 r0 = 0; r0 < padded; r0 += MR) {
                if (nonfinite < 0 || position(r0) + 1 - b > nonfinite) {
                    for (i64 d = 0; d < DP; d += NR) micro(KB, &pt[r0 * KB], &vb[d * KB], &acc[r0 * DP + d], DP);
                    continue;
                }
                // Skip masked keys: 0 * inf or 0 * NaN would be NaN.
                for (i64 r = r0; r < std::min(r0 + MR, rows); ++r)
                    for (i64 d = 0; d < D; ++d)
                        for (i64 j = 0; j < std::min(KB, position(r) + 1 - b); ++j)
                            acc[r * DP + d] = fma1(pt[(r0 * KB) + j * MR + r % MR], vb[(d / NR * KB + j) * NR + d % NR],
                                                   acc[r * DP + d]);
            }
            if ((b + KB) % LEAF && b + KB < last) continue;
            i64 leaf = b / LEAF * LEAF;
            if (!leaf) {
                m_all.swap(m);
                l_all.swap(l);
                acc_all.swap(acc);
                continue;
            }
            for (i64 r = 0; r < rows; ++r) {
                if (position(r) < leaf) continue;  // the leaf is fully masked
                float level = m[r] - m_all[r] <= RESERVE ? m_all[r] : m[r], before = exp1(m_all[r] - level),
                      after = exp1(m[r] - level);
                l_all[r] = fma1(l[r], after, l_all[r] * before);
                for (i64 d = 0; d < D; ++d)
                    acc_all[r * DP + d] = fma1(acc[r * DP + d], after, acc_all[r * DP + d] * before);
                m_all[r] = level;
            }
        }
        for (i64 r = 0; r < rows; ++r) {
            i64 index = (p.q_start[s] + it.q0 + r / group) * p.heads_q + hk * group + r % group;
            for (i64 d = 0; d < D; ++d) store(out + index * D + d, acc_all[r * DP + d] / l_all[r] + 0.f);
            if (m_out) { m_out[index] = m_all[r]; l_out[index] = l_all[r]; }
        }
    });
}

static void attention(const Attention& p, void* out, float* m, float* l) {
    if (p.dtype == F32) attention_t(p, (float*)out, m, l);
    else attention_t(p, (bf16*)out, m, l);
}

// c[m, n] = or += a . b^T, chains, on one thread; pa and pb are scratch for packing.
static void product(i64 m, i64 n, i64 k, Matrix a, Matrix b, float* c, i64 ldc, int accumulate, Array<float>& pa,
                    Array<float>& pb) {
    pa.resize((m + MR - 1) / MR * MR * k);
    for (i64 i = 0; i < m; i += MR) pack(a, i, m, k, MR, pa.data() + i * k);
    for (i64 j = 0; j < n; j += NR) panel(m, n, k, 1, pa.data(), b, j, c, ldc, accumulate, pb);
}

// Gradients of packed sequences, fp32 [T, H, D]. Chunks of query rows are visited in order, so every sum is one chain.
template <class T>
static void attention_grad_t(const Attention& p, const T* out, const float* m, const float* l, const T* d_out,
                             float* dq, float* dk, float* dv) {
    i64 group = p.heads_q / p.heads_kv, D = p.dim, HQ = p.heads_q, HK = p.heads_kv, CH = 128;
    int dt = p.dtype;
    parallel(p.seqs * HK, p.threads, [&](i64 w) {
        i64 s = w / HK, hk = w % HK, first = p.q_start[s], n = p.q_start[s + 1] - first;
        Array<float> sc, dp, pa, pb;
        const T *k = (const T*)p.k + first * p.k_row + hk * p.k_head,
                *v = (const T*)p.v + first * p.v_row + hk * p.v_head;
        for (i64 h = hk * group; h < (hk + 1) * group; ++h)
            for (i64 i0 = 0; i0 < n; i0 += CH) {  // chunks of query rows
                i64 i1 = std::min(i0 + CH, n), r = i1 - i0, c = i1;  // query rows, visible keys
                const T* qi = (const T*)p.q + (first + i0) * p.q_row + h * p.q_head;
                i64 index = (first + i0) * HQ + h;
                const T *oi = out + index * D, *gi = d_out + index * D;
                sc.assign(r * c, 0.f);
                dp.assign(r * c, 0.f);
                product(r, c, D, {qi, dt, p.q_row, 1}, {k, dt, p.k_row, 1}, sc.data(), c, 0, pa, pb);
                product(r, c, D, {gi, dt, HQ * D, 1}, {v, dt, p.v_row, 1}, dp.data(), c, 0, pa, pb);
                for (i64 i = 0; i < r; ++i) {
                    float delta = 0.f, mi = m[index + i * HQ], li = l[index + i * HQ];
                    for (i64 d = 0; d < D; ++d)
                        delta = fma1(load(gi + i * HQ * D + d), load(oi + i * HQ * D + d), delta);
                    for (i64 j = 0; j < c; ++j) {
                        float e = j <= i0 + i ? exp1(sc[i * c + j] * p.scale - mi) / li : 0.f;
                        sc[i * c + j] = e;
                        dp[i * c + j] = e * (dp[i * c + j] - delta) * p.scale;
                    }
                }
                product(r, D, c, {dp.data(), F32, c, 1}, {k, dt, 1, p.k_row}, dq + index * D, HQ * D, 0, pa, pb);
                i64 kv = (first * HK + hk) * D;
                product(c, D, r, {dp.data(), F32, 1, c}, {qi, dt, 1, p.q_row}, dk + kv, HK * D, 1, pa, pb);
                product(c, D, r, {sc.data(), F32, 1, c}, {gi, dt, 1, HQ * D}, dv + kv, HK * D, 1, pa, pb);
            }
        // A sum that underflows is +0, whichever masked keys and queries a chunk has.
        for (i64 i = first; i < first + n; ++i)
            for (i64 d = 0; d < D; ++d) {
                for (i64 h = hk * group; h < (hk + 1) * group; ++h) dq[(i * HQ + h) * D + d] += 0.f;
                dk[(i * HK + hk) * D + d] += 0.f;
                dv[(i * HK + hk) * D + d] += 0.f;
            }
    });
}

static void attention_grad(const Attention& p, const void* out, const float* m, const float* l, const void* d_out,
                           float* dq, float* dk, float* dv) {
    if (p.dtype == F32) attention_grad_t(p, (const float*)out, m, l, (const float*)d_out, dq, dk, dv);
    else attention_grad_t(p, (const bf16*)out, m, l, (const bf16*)d_out, dq, dk, dv);
}

static void exp(i64 n, const float* x, float* y) {
    DefaultRounding guard;
    for (i64 i = 0; i < n; ++i) y[i] = exp1(x[i]);
}

#define STRING_(x) #x
#define STRING(x) STRING_(x)
static const Kernels kernels = {STRING(ISA),
#define ALIGNKIT_ENTRY(name, parameters) name,
#define ALIGNKIT_KERNEL(name, parameters) name,
#include "entries.inl"
};
}  // namespace ISA

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
const Kernels* JOIN(ISA, _kernels)() { return &ISA::kernels; }

}  // namespace alignkit
