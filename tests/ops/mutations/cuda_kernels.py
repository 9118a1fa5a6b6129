"""Mutations of the CUDA kernels of csrc/sm90, which the trials compare with the Triton kernels.

The kernels' operands are bf16 and their sums fp32, so tf32 does not apply to them. A GEMM has no multiply-add to fuse,
because the tensor core computes it.
"""

from __future__ import annotations

from .mutation import Change, Mutation


def of_cuda(name: str, file: str, *changes: tuple[str, str] | tuple[str, str, int], noticed: str) -> Mutation:
    """Return a mutation of csrc/sm90/`file` by (old, new, times); `noticed` lists cases, separated by ", ".

    A case OPERATION/KERNEL is a trial, any other a golden function.
    """
    cases = tuple(f"trial {case}" if "/" in case else case for case in noticed.split(", "))
    return Mutation(name, "cuda", tuple(Change(f"csrc/sm90/{file}", *change) for change in changes), cases)


ATTENTION, BACKWARD, BACKWARD_256 = (f"attention/{name}.cu" for name in ("forward", "backward", "backward_256"))
NORM, DELTA, HEAD = "rms_norm/rms_norm.cu", "delta/gated_delta_rule.cu", "head/linear_logp.cu"
TREE, NARROW, WIDE = (f"gemm/skinny_{name}.cu" for name in ("split_k", "narrow", "wide"))
DOWN, SKINNY, COMBINE, GATED = (f"experts/{name}.cu" for name in ("down", "skinny", "combine", "gate_up"))
MUTATIONS = (
    # Attention, forward: chains over keys within a leaf, leaves merged in order.
    of_cuda(
        "attention: keys of a block reversed",
        ATTENTION,
        (
            "for (int j = 0; j < kKeys / 16; ++j) {\n        if constexpr (ones_separate)",
            "for (int j = kKeys / 16 - 1; j >= 0; --j) {\n        if constexpr (ones_separate)",
        ),
        ("accumulate || j > 0", "accumulate || j < kKeys / 16 - 1", 2),
        noticed="attention/cuda, paged_attention/cuda",
    ),
    of_cuda(
        "attention: head dimension reversed",
        ATTENTION,
        (
            "uint64_t a = q + j / 4 * q_box + j % 4 * kDescriptorStep<false>,\n"
            "                 b = k + j / 4 * k_box + j % 4 * kDescriptorStep<false>;",
            "int i = steps - 1 - j;\n        uint64_t a = q + i / 4 * q_box + i % 4 * kDescriptorStep<false>,\n"
            "                 b = k + i / 4 * k_box + i % 4 * kDescriptorStep<false>;",
        ),
        noticed="attention/cuda, paged_attention/cuda",
    ),
    of_cuda(
        "attention: leaves of 1024 keys",
        ATTENTION,
        ("constexpr int kLeaf = 512 / kKeys;", "constexpr int kLeaf = 1024 / kKeys;"),
        noticed="paged_attention/cuda, rounding_attention bfloat16",
    ),
    of_cuda(
        "attention: level rises at a probability of 4",
        ATTENTION,
        (
            "return at_least_2(exp2_approx(__fmaf_rn(score, factor, shift[h])));",
            "return exp2_approx(__fmaf_rn(score, factor, shift[h])) >= 4.0f;",
        ),
        noticed="rounding_levels bfloat16",
    ),
    of_cuda(
        "attention: exponent not fused",
        ATTENTION,
        ("__fmaf_rn(s[x], factor, shift[x / 2 % 2])", "s[x] * factor + shift[x / 2 % 2]"),
        ("__fmaf_rn(s[x + 1], factor, shift[x / 2 % 2])", "s[x + 1] * factor + shift[x / 2 % 2]"),
        noticed="attention/cuda, paged_attention/cuda",
    ),
    of_cuda(
        "attention: probabilities rounded toward zero",
        ATTENTION,
        (
            "pack<__nv_bfloat16>(a, b);\n      }",
            "pack<__nv_bfloat16>(__uint_as_float(__float_as_uint(a) & 0xffff0000), "
            "__uint_as_float(__float_as_uint(b) & 0xffff0000));\n      }",
        ),
        noticed="attention/cuda, paged_attention/cuda",
    ),
    of_cuda(
        "attention: subnormal results flushed",
        ATTENTION,
        ("a = __fdiv_rn(a, by + a * 0.0f);", "a = __fdiv_rn(a, by + a * 0.0f), a = fabsf(a) < 0x1p-126f ? 0.0f : a;"),
        noticed="rounding_attention bfloat16",
    ),
    # Attention, backward: chains over keys for dQ, over queries for dK and dV.
    of_cuda(
        "attention_backward: rows of a block reversed",
        BACKWARD,
        (
            "dq, ds[j], k0_transposed + offset + j * kDescriptorStep<true>",
            "dq, ds[3 - j], k0_transposed + offset + (3 - j) * kDescriptorStep<true>",
        ),
        (
            "dv, probability[j],\n                           q0_transposed + offset + grad_offset + j * ",
            "dv, probability[3 - j],\n                           q0_transposed + offset + grad_offset + (3 - j) * ",
        ),
        (
            "dk, ds[j], q0_transposed + offset + j * kDescriptorStep<true>",
            "dk, ds[3 - j], q0_transposed + offset + (3 - j) * kDescriptorStep<true>",
        ),
        noticed="attention_backward/cuda",
    ),
    of_cuda(
        "attention_backward: exponent not fused",
        BACKWARD,
        ("__fmaf_rn(s[x], factor, shift[x / 2 % 2])", "s[x] * factor + shift[x / 2 % 2]"),
        ("__fmaf_rn(s[4 * j + 2 * h], factor, pair.x)", "s[4 * j + 2 * h] * factor + pair.x"),
        ("__fmaf_rn(s[4 * j + 2 * h + 1], factor, pair.y)", "s[4 * j + 2 * h + 1] * factor + pair.y"),
        noticed="attention_backward/cuda",
    ),
    of_cuda(
        "attention_backward: probabilities rounded before dS",
        BACKWARD,
        (
            "s[x] = s[x] * (dp[x] - delta[x / 2 % 2]);",
            "s[x] = __bfloat162float(__float2bfloat16_rn(s[x])) * (dp[x] - delta[x / 2 % 2]);",
        ),
        noticed="attention_backward/cuda",
    ),
    of_cuda(
        "attention_backward: dP not fused with delta's product",
        BACKWARD,
        (
            "s[4 * j + 2 * h] = s[4 * j + 2 * h] * (dp[4 * j + 2 * h] - pair.x);",
            "s[4 * j + 2 * h] = s[4 * j + 2 * h] * dp[4 * j + 2 * h] - s[4 * j + 2 * h] * pair.x;",
        ),
        noticed="attention_backward/cuda",
    ),
    of_cuda(
        "attention_backward: rows of a block reversed, head dimension 256",
        BACKWARD_256,
        ("d, a[j], b + j * kDescriptorStep<true>, true);", "d, a[3 - j], b + (3 - j) * kDescriptorStep<true>, true);"),
        noticed="attention_backward/cuda",
    ),
    # Linear: chains over k, or the k-tree.
    of_cuda(
        "linear, tree: k of a step reversed",
        TREE,
        (
            "b + offset + j * kDescriptorStep<false>, a + offset + j * kDescriptorStep<false>",
            "b + offset + (kStep / 16 - 1 - j) * kDescriptorStep<false>,\n"
            "                          a + offset + (kStep / 16 - 1 - j) * kDescriptorStep<false>",
        ),
        noticed="linear/tree",
    ),
    of_cuda(
        "linear, tree: one chain instead of a warpgroup's leaves",
        TREE,
        ("  if (kLeaves > 1) {\n    copy(one", "  if (kLeaves > 8) {\n    copy(one"),
        ("  if (kLeaves > 2) {\n    copy(two", "  if (kLeaves > 8) {\n    copy(two"),
        (
            "(s, desc_a, desc_b, sh.full, sh.empty, steps, stage, phase);",
            "(s, desc_a, desc_b, sh.full, sh.empty, steps * kLeaves, stage, phase);",
        ),
        (
            "(s, desc_a, desc_b, sh.full, sh.empty, steps, stage,\n",
            "(s, desc_a, desc_b, sh.full, sh.empty, steps * kLeaves, stage,\n",
        ),
        noticed="linear/tree",
    ),
    of_cuda(
        "linear, tree: another k-tree",
        TREE,
        ("    add(one, sums);\n    add(two, sums);", "    add(two, one);\n    add(one, sums);"),
        (
            "for (int width = 1; width < kParts; width *= 2)\n#pragma unroll\n"
            "    for (int i = 0; i < kParts; i += 2 * width) {",
            "for (int width = kParts / 2; width; width /= 2)\n#pragma unroll\n    for (int i = 0; i < width; ++i) {",
        ),
        (
            "sums[i] = sums[i] + sh.sums[1][i][thread] + bias[i / 2 % 2];",
            "sums[i] = sums[i] + (sh.sums[1][i][thread] + bias[i / 2 % 2]);",
        ),
        noticed="linear/tree",
    ),
    of_cuda(
        "linear, tree: rounded before the bias",
        TREE,
        (
            "sums[i] = sums[i] + sh.sums[1][i][thread] + bias[i / 2 % 2];",
            "sums[i] = static_cast<float>(static_cast<Out>(sums[i] + sh.sums[1][i][thread])) + bias[i / 2 % 2];",
        ),
        (
            "static_cast<Out>(sums[i] + target.bias_of(column + i))",
            "static_cast<Out>(static_cast<float>(static_cast<Out>(sums[i])) + target.bias_of(column + i))",
        ),
        noticed="linear/tree",
    ),
    of_cuda(
        "linear, narrow: k of a step reversed",
        NARROW,
        (
            "current.b[j], current.a[j / 2][j % 2 * 2], current.a[j / 2][j % 2 * 2 + 1]",
            "current.b[7 - j], current.a[(7 - j) / 2][(7 - j) % 2 * 2], current.a[(7 - j) / 2][(7 - j) % 2 * 2 + 1]",
        ),
        noticed="linear/narrow",
    ),
    of_cuda(
        "linear, narrow: k split into two chains",
        NARROW,
        ("float sums[4] = {};", "float sums[4] = {}, other[4] = {};"),
        ("mma_m16n8k16(sums, next.b[j]", "mma_m16n8k16(other, next.b[j]"),
        (
            "  for (int i = 0; i < 4; ++i) {\n    int column",
            "  for (int i = 0; i < 4; ++i) {\n    sums[i] += other[i];\n    int column",
        ),
        noticed="linear/narrow",
    ),
    of_cuda(
        "linear, narrow: rounded before the bias",
        NARROW,
        (
            "sums[i] + __bfloat162float(bias[column])",
            "static_cast<float>(static_cast<Out>(sums[i])) + __bfloat162float(bias[column])",
        ),
        noticed="linear/narrow",
    ),
    of_cuda(
        "linear, few: k of a step reversed",
        WIDE,
        (
            "desc_b + j * kDescriptorStep<false>, desc_a + j * kDescriptorStep<false>",
            "desc_b + (kStep / 16 - 1 - j) * kDescriptorStep<false>, "
            "desc_a + (kStep / 16 - 1 - j) * kDescriptorStep<false>",
        ),
        noticed="linear/few",
    ),
    of_cuda(
        "linear, few: k split into two chains",
        WIDE,
        ("float sums[kWidth / 2];", "float sums[kWidth / 2], other[kWidth / 2];"),
        ("wgmma<false, false>(sums, desc_b", "wgmma<false, false>(j % 2 ? other : sums, desc_b"),
        ("i + j > 0);", "i * (kStep / 16) + j > 1);"),
        ("warpgroup_fence_operand(sums);", "warpgroup_fence_operand(sums);\n    warpgroup_fence_operand(other);"),
        ("+ 8 * h] = sums[i];", "+ 8 * h] = sums[i] + other[i];"),
        noticed="linear/few",
    ),
    # The mainloop of the LM head's and the experts' GEMMs: chains over k.
    of_cuda(
        "head and experts: k of a step reversed",
        "gemm/gemm.cuh",
        (
            "a + j * kDescriptorStep<kATransposed>,\n"
            "                                          b + j * kDescriptorStep<kBTransposed>, kResumes",
            "a + (kStep / 16 - 1 - j) * kDescriptorStep<kATransposed>,\n"
            "                                          "
            "b + (kStep / 16 - 1 - j) * kDescriptorStep<kBTransposed>, kResumes",
        ),
        noticed="head_statistics/cuda, head_gradient/cuda, head_products/cuda, moe_gated/many, moe_gradients/many",
    ),
    # LM head: the statistics are integer sums, whose order changes no bit.
    of_cuda(
        "head: temperature by a reciprocal",
        HEAD,
        ("x = __fdiv_rn(x, temperature);", "x = x * __frcp_rn(temperature);"),
        noticed="head_statistics/cuda, head_gradient/cuda",
    ),
    of_cuda(
        "head: exponential of the CUDA library",
        HEAD,
        ("float e = exponential(d);", "float e = expf(d);"),
        ("float e = exponential(lp), d", "float e = expf(lp), d"),
        noticed="head_statistics/cuda, head_gradient/cuda",
    ),
    of_cuda(
        "head: gradient rounded before the temperature",
        HEAD,
        (
            "d = __fdiv_rn(d, state.temperature[h]);",
            "d = __fdiv_rn(__bfloat162float(__float2bfloat16_rn(d)), state.temperature[h]);",
        ),
        noticed="head_gradient/cuda",
    ),
    # Experts: the k-tree of the down projection, the gate, and the tree over a token's experts.
    of_cuda(
        "moe_products, many: one chain instead of the k-tree",
        DOWN,
        ("Tree<kLeaves>::sum(consumer, acc, slices, saved);", "Tree<1>::sum(consumer, acc, slices * kLeaves, saved);"),
        noticed="moe_products/many",
    ),
    of_cuda(
        "moe_products, many: leaves added in order",
        DOWN,
        (
            "Tree<kLeaves / 2>::sum(consumer, acc, slices, saved);",
            "Tree<kLeaves - 1>::sum(consumer, acc, slices, saved);",
        ),
        (
            "Tree<kLeaves / 2>::sum(consumer, right, slices, saved);",
            "Tree<kLeaves / kLeaves>::sum(consumer, right, slices, saved);",
        ),
        ("template <>\nstruct Tree<8> {", "struct Tree8 {"),
        noticed="moe_products/many",
    ),
    of_cuda(
        "moe_products, few: one chain instead of the k-tree",
        SKINNY,
        (
            "if constexpr (kLeaves == 1) {\n    consumer.chain(acc, slices);",
            "if constexpr (kLeaves > 0) {\n    consumer.chain(acc, slices * kLeaves);",
        ),
        noticed="moe_products/few",
    ),
    of_cuda(
        "moe_products, few: leaves added in order",
        SKINNY,
        ("sum_leaves<kLeaves / 2>(consumer, acc, slices);", "sum_leaves<kLeaves - 1>(consumer, acc, slices);"),
        ("sum_leaves<kLeaves / 2>(consumer, right, slices);", "sum_leaves<1>(consumer, right, slices);"),
        noticed="moe_products/few",
    ),
    of_cuda(
        "moe_products, few: rounded toward zero",
        SKINNY,
        ("__float2bfloat16_rn(acc[i])", "__float2bfloat16_rz(acc[i])"),
        noticed="moe_products/few",
    ),
    of_cuda(
        "moe_gated: gate not rounded before silu",
        GATED,
        ("gate[j] = rounded(sums[i + j]);", "gate[j] = sums[i + j];"),
        noticed="moe_gated/many",
    ),
    of_cuda(
        "moe_gated: exponential of the CUDA library",
        GATED,
        ("1.0f + exponential(-gate[j])", "1.0f + expf(-gate[j])"),
        noticed="moe_gated/many",
    ),
    of_cuda(
        "moe_gated: silu by a reciprocal",
        GATED,
        ("__fdiv_rn(gate[j], 1.0f + exponential(-gate[j]))", "gate[j] * __frcp_rn(1.0f + exponential(-gate[j]))"),
        noticed="moe_gated/many",
    ),
    of_cuda(
        "moe_combine: experts added in order",
        COMBINE,
        ("int64_t offset[kMaxIds];", "parent_lane = lane > 0 && lane < count ? 0 : -1;\n  int64_t offset[kMaxIds];"),
        noticed="rounding_mixtures float32",
    ),
    of_cuda(
        "moe_combine: weighted outputs rounded",
        COMBINE,
        ("? weights[n] * x : x)", "? __bfloat162float(__float2bfloat16_rn(weights[n] * x)) : x)"),
        noticed="moe_combine/vectors, rounding_mixtures",
    ),
    # RMSNorm: balanced trees over a row, chains of rows for dweight.
    of_cuda(
        "rms_norm: another tree",
        NORM,
        (
            "((f[0] + f[1]) + (f[2] + f[3])) + ((f[4] + f[5]) + (f[6] + f[7]))",
            "((f[0] + f[4]) + (f[1] + f[5])) + ((f[2] + f[6]) + (f[3] + f[7]))",
        ),
        noticed="rms_norm/cuda, rms_norm_backward/cuda",
    ),
    of_cuda(
        "rms_norm: one chain instead of a vector's tree",
        NORM,
        (
            "((f[0] + f[1]) + (f[2] + f[3])) + ((f[4] + f[5]) + (f[6] + f[7]))",
            "f[0] + f[1] + f[2] + f[3] + f[4] + f[5] + f[6] + f[7]",
        ),
        noticed="rms_norm/cuda, rms_norm_backward/cuda",
    ),
    of_cuda(
        "rms_norm: multiplied by the weight first",
        NORM,
        (
            "f[i] = f[i] * rstd * (w[i] + (p.zero_centered ? 1.0f : -0.0f));",
            "f[i] = f[i] * (rstd * (w[i] + (p.zero_centered ? 1.0f : -0.0f)));",
        ),
        noticed="rms_norm/cuda",
    ),
    of_cuda(
        "rms_norm_backward: dx not fused",
        NORM,
        ("__fmaf_rn(-row_c, x[i], dy[i] * w[i])", "(dy[i] * w[i] - row_c * x[i])"),
        noticed="rms_norm_backward/cuda",
    ),
    of_cuda(
        "rms_norm_backward: dweight not fused",
        NORM,
        ("acc = __fmaf_rn(dy[i], x[i] * row_rstd, acc);", "acc = dy[i] * (x[i] * row_rstd) + acc;"),
        noticed="rms_norm_backward/cuda",
    ),
    # Gated delta rule: per chunk, D continues one chain over the rows of q, then over the rows of w.
    of_cuda(
        "gated_delta_rule: rows of a chunk reversed",
        DELTA,
        (
            "d[part], b[i], q_operand + part * (kBoxBytes >> 4) + i * ",
            "d[part], b[3 - i], q_operand + part * (kBoxBytes >> 4) + (3 - i) * ",
        ),
        (
            "d[part], c[i], w_operand + part * (kBoxBytes >> 4) + i * ",
            "d[part], c[3 - i], w_operand + part * (kBoxBytes >> 4) + (3 - i) * ",
        ),
        (
            "d[part], minus[i], w_operand + part * (kBoxBytes >> 4) + i * ",
            "d[part], minus[3 - i], w_operand + part * (kBoxBytes >> 4) + (3 - i) * ",
        ),
        noticed="gated_delta_rule/cuda",
    ),
    of_cuda(
        "gated_delta_rule: dv2 not fused",
        DELTA,
        (
            "pack<T>(__fmaf_rn(factor.x, x[index], v.x), __fmaf_rn(factor.y, x[index + 1], v.y))",
            "pack<T>(factor.x * x[index] + v.x, factor.y * x[index + 1] + v.y)",
        ),
        noticed="gated_delta_rule/cuda",
    ),
    of_cuda(
        "gated_delta_rule: dv's factor of two exponentials",
        DELTA,
        ("exp2_approx((last - g[i]) * unit)", "exp2_approx(last * unit) * exp2_approx(-g[i] * unit)"),
        noticed="gated_delta_rule/cuda",
    ),
    of_cuda(
        "gated_delta_rule: dv2 rounded before dv is added",
        DELTA,
        (
            "pack<T>(__fmaf_rn(factor.x, x[index], v.x), __fmaf_rn(factor.y, x[index + 1], v.y))",
            "pack<T>(__bfloat162float(__float2bfloat16_rn(factor.x * x[index])) + v.x, "
            "__bfloat162float(__float2bfloat16_rn(factor.y * x[index + 1])) + v.y)",
        ),
        noticed="gated_delta_rule/cuda",
    ),
)
