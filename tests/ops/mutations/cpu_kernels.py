"""Mutations of the C++ kernels and of the reference."""

from __future__ import annotations

from .mutation import Change, Mutation

FILE = "csrc/cpu/kernels.inl"


def of_cpp(name: str, old: str, new: str, *noticed: str, times: int = 1) -> Mutation:
    return Mutation(name, "cpu", (Change(FILE, old, new, times),), noticed)


def of_reference(name: str, file: str, old: str, new: str, *noticed: str) -> Mutation:
    return Mutation(name, "reference", (Change(f"alignkit/ops/{file}", old, new),), noticed)


SUMS = ("rounding_linears", "rounding_attention", "rounding_head", "rounding_mixtures")
LANES = ("rounding_norms", "rounding_rotations", "rounding_mixtures")
MUTATIONS = (
    of_cpp(
        "k reversed",
        "for (i64 p = 0; p < k; ++p) {\n            vf",
        "for (i64 p = k - 1; p >= 0; --p) {\n            vf",
        *SUMS,
    ),
    of_cpp(
        "one chain instead of the k-tree",
        "i64 step = k / leaves;",
        "leaves = 1;\n    i64 step = k;",
        "rounding_linears",
        "rounding_mixtures",
    ),
    of_cpp(
        "leaves added in order",
        "for (i64 n = leaf; n & 1; n >>= 1, ++d)",
        "for (i64 n = leaf > 0; n; n = 0, d = 0)",
        "rounding_linears",
        "rounding_mixtures",
    ),
    of_cpp(
        "k split into two chains",
        "i64 step = k / leaves;",
        "if (leaves == 1 && k % 2 == 0) leaves = 2;\n    i64 step = k / leaves;",
        "rounding_linears",
        "rounding_head",
        "rounding_mixtures",
    ),
    of_cpp(
        "multiply-add not fused",
        "return __builtin_fmaf(a, b, c);",
        "return a * b + c;",
        *SUMS,
        *LANES,
        "rounding_elementwise",
    ),
    of_cpp(
        "subnormal numbers flushed",
        "        DefaultRounding guard;\n#pragma omp for",
        "        DefaultRounding guard;\n        _mm_setcsr(_mm_getcsr() | 0x8040);\n#pragma omp for",
        "subnormal_linears",
        "rounding_attention",
        "rounding_norms",
        "rounding_rotations",
        "rounding_elementwise",
        "rounding_mixtures",
    ),
    of_cpp(
        "operands rounded to tf32",
        "out[p * width + i] = load(s + p * x.col);",
        "{ uint32_t bits = float_bits(load(s + p * x.col)) & ~0x1fffu; std::memcpy(out + p * width + i, &bits, 4); }",
        "rounding_linears",
        "rounding_head",
        "rounding_mixtures",
    ),
    of_cpp(
        "rounded before the bias",
        "store(o + j, p[j] + bias[j]);",
        "{ bf16 t; store(&t, p[j]); store(o + j, load(&t) + bias[j]); }",
        "rounding_linears",
    ),
    of_cpp(
        "lanes added by neighbors",
        "s[i] += s[i + h];",
        "s[i] = s[2 * i] + s[2 * i + 1];",
        *LANES,
        "rounding_l2_norm",
        "rounding_gated_rms_norm",
    ),
    of_cpp(
        "one lane instead of 16",
        "{ float v = load(p + j + l); s[l] = fma1(v, v, s[l]); }",
        "{ float v = load(p + j + l); s[0] = fma1(v, v, s[0]); }",
        "rounding_norms",
        "rounding_rotations",
    ),
    of_cpp(
        "norm multiplied by weight first",
        "load(p + j) * rs * w[j]",
        "load(p + j) * (rs * w[j])",
        "rounding_norms",
        "rounding_gated_rms_norm",
        times=3,
    ),
    of_cpp(
        "gradient of the norm's weight from the last row",
        "for (i64 r = 0; r < rows; ++r)\n            for (i64 j = j0",
        "for (i64 r = rows - 1; r >= 0; --r)\n            for (i64 j = j0",
        "rounding_norms",
        "rounding_gated_rms_norm",
        times=2,
    ),
    of_cpp("rotation not fused", "fma1(a, c, -(b * s))", "a * c - b * s", "rounding_elementwise", "rounding_rotations"),
    of_cpp(
        "sigmoid by a reciprocal",
        "v / (1.f + exp1(-v)) * load",
        "v * (1.f / (1.f + exp1(-v))) * load",
        "rounding_elementwise",
        "rounding_mixtures",
    ),
    of_cpp(
        "gate rounded",
        "store(y + r * n + j, s * load(x + r * n + j))",
        "store(y + r * n + j, round_to<T>(s) * load(x + r * n + j))",
        "rounding_mixtures",
    ),
    of_cpp(
        "another tree over experts",
        "memory[i] = memory[2 * i] + memory[2 * i + 1];",
        "memory[i] = memory[i] + memory[i + n / 2];",
        "rounding_mixtures",
    ),
    of_cpp(
        "experts added in order",
        "leaf[alive[remaining - 1]] >> level == leaf[alive[i]] >> level",
        "level",
        "rounding_mixtures",
    ),
    of_cpp(
        "weighted outputs rounded",
        "term[j] = w * load(p + j);",
        "term[j] = round_to<O>(w * load(p + j));",
        "rounding_mixtures",
    ),
    of_cpp(
        "probabilities added unrounded",
        "l[r] += pr[j * MR] = round_to<T>(sr[j]);",
        "{ pr[j * MR] = round_to<T>(sr[j]); l[r] += sr[j]; }",
        "rounding_attention",
    ),
    of_cpp("attention leaves of 256", "constexpr i64 LEAF = 128;", "constexpr i64 LEAF = 256;", "rounding_attention"),
    of_cpp(
        "attention's level rises at a probability of 4",
        "if (round_to<T>(exp1(top - m[r])) >= 2) {",
        "if (round_to<T>(exp1(top - m[r])) >= 4) {",
        "rounding_levels",
    ),
    of_cpp(
        "leaves merged without fma",
        "acc_all[r * DP + d] = fma1(acc[r * DP + d], after, acc_all[r * DP + d] * before);",
        "acc_all[r * DP + d] = acc[r * DP + d] * after + acc_all[r * DP + d] * before;",
        "rounding_attention",
    ),
    of_cpp("temperature by a reciprocal", "o[j] /= t;", "o[j] *= 1.f / t;", "rounding_head", times=2),
    of_cpp(
        "log-sum-exp rounded before the difference",
        "float(double(load(z + r * ldz + j) / t) - lse[r])",
        "load(z + r * ldz + j) / t - float(lse[r])",
        "rounding_head",
    ),
    of_cpp(
        "element's gate rounded",
        "1.f / (1.f + exp1(-load(gate + r * ldg + j))) * load",
        "round_to<T>(1.f / (1.f + exp1(-load(gate + r * ldg + j)))) * load",
        "rounding_sigmoid_mul_each",
    ),
    of_cpp(
        "newest token of a convolution first",
        "for (i64 j = 0; j < taps; ++j) {\n            const T* p = row(r - (taps - 1) + j);\n            for",
        "for (i64 j = taps - 1; j >= 0; --j) {\n            const T* p = row(r - (taps - 1) + j);\n            for",
        "rounding_short_conv",
    ),
    of_cpp(
        "gradient of a convolution's filter from the last row",
        "for (i64 r = 0; r < starts[s + 1] - starts[s]; ++r)",
        "for (i64 r = starts[s + 1] - starts[s] - 1; r >= 0; --r)",
        "rounding_short_conv",
    ),
    of_cpp(
        "logarithm of softplus in fp32",
        "float(std::log1p(double(exp1(x))))",
        "std::log1p(exp1(x))",
        "rounding_delta_gates",
    ),
    of_cpp(
        "gate's gradient multiplied from the right",
        "dg[i] * factor[j] * slope",
        "dg[i] * (factor[j] * slope)",
        "rounding_delta_gates",
    ),
    of_cpp(
        "rows of a chunk's state added from the last",
        "for (i64 i = 0; i < CHUNK; ++i)\n                for (i64 c = 0; c < V; ++c) p[c] = fma1(keys",
        "for (i64 i = CHUNK - 1; i >= 0; --i)\n                for (i64 c = 0; c < V; ++c) p[c] = fma1(keys",
        "rounding_delta_rule",
    ),
    of_cpp(
        "inverse of a chunk not rounded",
        "float factor = round_to<T>(d[i * CHUNK + j]);",
        "float factor = d[i * CHUNK + j];",
        "rounding_delta_rule",
    ),
    of_cpp(
        "beta multiplied first",
        "beta * (load(v + c) - grown * x[c])",
        "(beta * load(v + c) - beta * (grown * x[c]))",
        "rounding_delta_rule",
    ),
    of_cpp(
        "state of a chunk not rounded", "rounded[i] = round_to<T>(s[i]);", "rounded[i] = s[i];", "rounding_delta_rule"
    ),
    of_reference(
        "k reversed",
        "linear/reference.py",
        "for k in range(a.shape[1]):",
        "for k in reversed(range(a.shape[1])):",
        "rounding_linears",
        "rounding_head",
        "rounding_mixtures",
    ),
    of_reference(
        "another k-tree",
        "linear/reference.py",
        "zip(parts[::2], parts[1::2], strict=True)",
        "zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True)",
        "rounding_linears",
        "rounding_mixtures",
    ),
)
