"""Mutations of the Triton kernels, which the golden bits of the sm90 family validate.

A kernel that sums integers has no order, and an elementwise kernel has no sum. `sums` of linear/ computes the GEMMs of
the LM head, of the MoE router's callers and of the experts too.
"""

from __future__ import annotations

from .mutation import Change, Mutation

Edit = tuple[str, str] | tuple[str, str, int]


def of_triton(name: str, file: str, *changes: Edit, noticed: str) -> Mutation:
    """Return a mutation of alignkit/ops/`file` by (old, new, times); `noticed` lists cases, separated by ", ".

    A case OPERATION/KERNEL is a trial, any other a golden function.
    """
    cases = tuple(f"trial {case}" if "/" in case else case for case in noticed.split(", "))
    return Mutation(name, "triton", tuple(Change(f"alignkit/ops/{file}", *change) for change in changes), cases)


def flushed(value: str) -> str:
    """Return the text of `value` with subnormal numbers replaced by zero."""
    return f"tl.where(tl.abs({value}) < 1.1754943508222875e-38, 0.0, {value})"


HELPERS = "_triton.py"
LINEAR, HOPPER = "linear/triton_backend.py", "linear/hopper.py"
ATTENTION, GRADIENTS, DECODE = (f"attention/{name}.py" for name in ("common", "gradients", "few"))
HEAD = "linear_logp/triton_backend.py"
EXPERTS, GROUPED, ROUTER = "moe_experts/triton_backend.py", "moe_experts/grouped.py", "moe_router/triton_backend.py"
NORM, QK, ROPE = (f"{op}/triton_backend.py" for op in ("rms_norm", "qk_norm_rope", "rope"))
SILU, SIGMOID, DELTA = "silu_mul/triton_backend.py", "sigmoid_mul/reference.py", "gated_delta_rule/triton_backend.py"
CHAIN = '            acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")\n    else:'
BY_W = (
    "        D = tl.dot(tl.trans(_rows_of(w, row, count, heads * K, 0, K, C)), "
    "new * -1.0, D, input_precision=PRECISION)\n"
)
MUTATIONS = (
    # Several ops.
    of_triton(
        "another tree",
        HELPERS,
        (
            "tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), axis=2",
            "tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), axis=1",
        ),
        noticed="rounding_linears, rounding_norms, rounding_rotations, rounding_mixtures",
    ),
    of_triton(
        "one chain instead of a tree",
        HELPERS,
        (
            "    for _ in tl.static_range(LEVELS):\n"
            "        x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), axis=2)\n"
            "    return tl.reshape(x, (x.shape[0],))",
            "    total = tl.zeros((x.shape[0],), tl.float32)\n    for i in range(x.shape[1]):\n"
            "        total += tl.sum(tl.where(tl.arange(0, x.shape[1])[None, :] == i, x, 0.0), axis=1)\n"
            "    return total",
        ),
        noticed="rounding_norms, rounding_rotations, rounding_mixtures",
    ),
    of_triton(
        "multiply-adds fused",
        "../runtime/launch.py",
        ('"enable_fp_fusion": False', '"enable_fp_fusion": True'),
        noticed="rounding_attention, rounding_head, rounding_mixtures, rounding_rotations, rounding_norms",
    ),
    of_triton(
        "exponential of libdevice",
        HELPERS,
        (
            "import triton.language as tl\n",
            "import triton.language as tl\nfrom triton.language.extra import libdevice\n",
        ),
        ("return tl.exp2(x * LOG2E)", "return libdevice.exp(x)"),
        noticed="rounding_head, rounding_mixtures, rounding_elementwise",
    ),
    # Linear and the GEMMs of the LM head and the experts: chains over k, or the k-tree.
    of_triton(
        "linear: k reversed",
        LINEAR,
        ("a, b, s * BLOCK_K, K, sak", "a, b, (STEPS - 1 - s) * BLOCK_K, K, sak", 2),
        noticed="rounding_linears, subnormal_linears, rounding_head, rounding_mixtures",
    ),
    of_triton(
        "linear: operands rounded to tf32",
        LINEAR,
        ('input_precision="ieee"', 'input_precision="tf32"', 2),
        noticed="rounding_linears, subnormal_linears, rounding_head, rounding_mixtures",
    ),
    of_triton(
        "linear: k split into two chains",
        LINEAR,
        ("    if LEAVES == 1:\n", "    if LEAVES == 1:\n        first = acc * 0.0\n"),
        (
            CHAIN,
            "            if s == STEPS // 2:\n                first = acc\n                acc = acc * 0.0\n"
            + CHAIN.replace("    else:", "        acc = first + acc\n    else:"),
        ),
        noticed="rounding_linears, rounding_head, rounding_mixtures",
    ),
    of_triton(
        "linear: another k-tree",
        LINEAR,
        ("acc = two + acc\n", "acc = acc + one\n"),
        noticed="rounding_linears, rounding_mixtures",
    ),
    of_triton(
        "linear: one chain instead of the k-tree",
        "linear/__init__.py",
        ("leaves=row_leaves or 1, bias", "leaves=1, bias"),
        noticed="rounding_linears",
    ),
    of_triton(
        "linear: multiply-add not fused",
        LINEAR,
        (
            CHAIN,
            "            for i in range(BLOCK_K):\n                one = tl.arange(0, BLOCK_K) == i\n"
            "                left = tl.sum(tl.where(one[None, :], a_tile.to(tl.float32), 0.0), axis=1)\n"
            "                right = tl.sum(tl.where(one[:, None], b_tile.to(tl.float32), 0.0), axis=0)\n"
            "                acc = acc + left[:, None] * right[None, :]\n    else:",
        ),
        noticed="rounding_linears float32",
    ),
    of_triton(
        "linear: subnormal operands flushed",
        LINEAR,
        ("    return a_tile, b_tile", f"    return {flushed('a_tile')}.to(a_tile.dtype), b_tile"),
        noticed="subnormal_linears",
    ),
    of_triton(
        "linear: subnormal results flushed",
        LINEAR,
        (
            "    tl.store(c, acc.to(C.dtype.element_ty), mask=ok)",
            f"    acc = {flushed('acc')}\n    tl.store(c, acc.to(C.dtype.element_ty), mask=ok)",
        ),
        noticed="subnormal_linears",
    ),
    of_triton(
        "linear: rounded before the bias",
        LINEAR,
        (
            "        acc += tl.load(BIAS + j, mask=n_ok, other=0.0).to(tl.float32)[None, :]",
            "        acc = acc.to(C.dtype.element_ty).to(tl.float32)\n"
            "        acc += tl.load(BIAS + j, mask=n_ok, other=0.0).to(tl.float32)[None, :]",
        ),
        noticed="rounding_linears bfloat16",
    ),
    of_triton(
        "linear, hopper: another k-tree",
        HOPPER,
        (
            "acc += _load_piece(SUMS, slot + 1) + _load_piece(SUMS, slot + 2)",
            "acc = acc + _load_piece(SUMS, slot + 1)\n        acc += _load_piece(SUMS, slot + 2)",
        ),
        (
            "return _fence(two + (third + _end(acc, it, shared))), it",
            "return _fence((two + third) + _end(acc, it, shared)), it",
        ),
        noticed="linear/hopper",
    ),
    of_triton(
        "linear, hopper: rounded before the bias",
        HOPPER,
        (
            "        acc += gl.load(BIAS + j, mask=j < N, other=0.0).to(gl.float32)[None, :]",
            "        acc = acc.to(c_desc.dtype).to(gl.float32)\n"
            "        acc += gl.load(BIAS + j, mask=j < N, other=0.0).to(gl.float32)[None, :]",
        ),
        noticed="linear/hopper",
    ),
    # Attention, forward and paged: chains over keys within a leaf, leaves merged in order.
    of_triton(
        "attention: keys of a block reversed",
        ATTENTION,
        ("tl.minimum(begin + tl.arange(0, KVB), end - 1)", "tl.minimum(begin + KVB - 1 - tl.arange(0, KVB), end - 1)"),
        ("    j = tl.arange(0, KVB)\n", "    j = KVB - 1 - tl.arange(0, KVB)\n"),
        noticed="rounding_attention",
    ),
    of_triton(
        "attention: head dimension reversed",
        ATTENTION,
        (
            "score = tl.dot(q, tl.trans(load_rows(K, row, skt, D, DP))",
            "score = tl.dot(tl.flip(q, 1), tl.trans(tl.flip(load_rows(K, row, skt, D, DP), 1))",
        ),
        noticed="rounding_attention",
    ),
    of_triton(
        "attention: operands rounded to tf32",
        ATTENTION,
        ('input_precision="ieee"', 'input_precision="tf32"', 3),
        noticed="rounding_attention float32",
    ),
    of_triton(
        "attention: one chain instead of leaves",
        "attention/triton_backend.py",
        ('"LEAF": SM90.kv_leaf}', '"LEAF": SM90.kv_leaf * 64}'),
        noticed="rounding_attention",
    ),
    of_triton(
        "attention: blocks of half as many keys",
        "attention/triton_backend.py",
        ('"KVB": SM90.kv_block', '"KVB": SM90.kv_block // 2'),
        noticed="rounding_levels",
    ),
    of_triton(
        "attention: level rises at a probability of 4",
        ATTENTION,
        (".to(q.dtype) >= 2.0", ".to(q.dtype) >= 4.0"),
        noticed="rounding_levels",
    ),
    of_triton(
        "attention: exponent not fused",
        ATTENTION,
        ("p = tl.exp2(tl.fma(score, factor, z[:, None]))", "p = tl.exp2(score * factor + z[:, None])"),
        noticed="rounding_attention",
    ),
    of_triton(
        "attention: leaves merged without fma",
        ATTENTION,
        (
            "tl.fma(acc, tl.broadcast_to(beta[:, None], acc.shape), A * alpha[:, None])",
            "acc * beta[:, None] + A * alpha[:, None]",
        ),
        noticed="rounding_attention float32",
    ),
    of_triton(
        "attention: probabilities added unrounded",
        ATTENTION,
        (
            'l = tl.dot(p, tl.full((KVB, ONES), 1.0, q.dtype), l * alpha[:, None], input_precision="ieee")',
            "l = l * alpha[:, None] + tl.sum(tl.exp2(tl.fma(score, factor, z[:, None])), axis=1)[:, None]",
        ),
        noticed="rounding_attention",
    ),
    of_triton(
        "attention: normalized by a reciprocal",
        ATTENTION,
        ("out = tl.div_rn(A, L[:, None] + A * 0.0)", "out = A * tl.div_rn(L * 0.0 + 1.0, L)[:, None]"),
        noticed="rounding_attention float32",
    ),
    of_triton(
        "attention: subnormal results flushed",
        ATTENTION,
        (
            "out = tl.div_rn(A, L[:, None] + A * 0.0)",
            f"out = tl.div_rn(A, L[:, None] + A * 0.0)\n    out = {flushed('out')}",
        ),
        noticed="rounding_attention",
    ),
    of_triton(
        "paged_attention: leaves merged without fma",
        DECODE,
        ("A = tl.fma(accs[x], beta, A)", "A = accs[x] * beta + A"),
        (
            "A = tl.where(x < count, tl.fma(accs[x], beta, A * alpha), A)",
            "A = tl.where(x < count, accs[x] * beta + A * alpha, A)",
        ),
        noticed="rounding_attention float32",
    ),
    # Attention, backward: chains over keys for dQ, over queries for dK and dV.
    of_triton(
        "attention_backward: blocks reversed",
        GRADIENTS,
        (
            "    for b in range(0, end, BLOCK_N):\n",
            "    for c in range(0, end, BLOCK_N):\n        b = (end - 1) // BLOCK_N * BLOCK_N - c\n",
        ),
        ("i0 = first + b % blocks * BLOCK_I", "i0 = first + (blocks - 1 - b % blocks) * BLOCK_I"),
        noticed="rounding_attention",
    ),
    of_triton(
        "attention_backward: heads reversed",
        GRADIENTS,
        ("h = hk * GROUP + b // blocks", "h = hk * GROUP + GROUP - 1 - b // blocks"),
        noticed="rounding_attention",
    ),
    of_triton(
        "attention_backward: one chain per head",
        GRADIENTS,
        (
            "        h = hk * GROUP + b // blocks\n",
            "        h = hk * GROUP + b // blocks\n        if b == blocks:\n            dk0, dv0 = dk, dv\n"
            "            dk, dv = dk * 0.0, dv * 0.0\n",
        ),
        (
            "    blocks = tl.cdiv(n - first, BLOCK_I)\n",
            "    blocks = tl.cdiv(n - first, BLOCK_I)\n    dk0, dv0 = dk, dv\n",
        ),
        (
            "    out = ((q0 + j).to(tl.int64)[:, None] * KV + hk)",
            "    dk, dv = dk0 + dk, dv0 + dv\n    out = ((q0 + j).to(tl.int64)[:, None] * KV + hk)",
        ),
        noticed="rounding_attention",
    ),
    of_triton(
        "attention_backward: operands rounded to tf32",
        GRADIENTS,
        ('input_precision="ieee"', 'input_precision="tf32"', 7),
        noticed="rounding_attention float32",
    ),
    of_triton(
        "attention_backward: another tree for delta",
        GRADIENTS,
        ("tl.sum(g * o, axis=1)", "tl.sum(tl.sum(tl.reshape(g * o, (R, DP // 4, 4)), axis=1), axis=1)"),
        noticed="rounding_attention float32",
    ),
    of_triton(
        "attention_backward: exponent not fused",
        GRADIENTS,
        (
            'tl.fma(tl.dot(q, tl.trans(k), input_precision="ieee"), factor, shift[:, None])',
            'tl.dot(q, tl.trans(k), input_precision="ieee") * factor + shift[:, None]',
        ),
        (
            'tl.fma(tl.dot(k, tl.trans(q), input_precision="ieee"), factor, shift[None, :])',
            'tl.dot(k, tl.trans(q), input_precision="ieee") * factor + shift[None, :]',
        ),
        noticed="rounding_attention",
    ),
    of_triton(
        "attention_backward: probabilities rounded before dS",
        GRADIENTS,
        ("ds = p * (tl.dot(g, tl.trans(v)", "ds = p.to(k.dtype).to(tl.float32) * (tl.dot(g, tl.trans(v)"),
        noticed="rounding_attention bfloat16",
    ),
    # LM head: elementwise operations and integer sums.
    of_triton(
        "head: temperature by a reciprocal",
        HEAD,
        ("x = tl.div_rn(x, temperature)", "x = x * tl.div_rn(x * 0.0 + 1.0, temperature + x * 0.0)"),
        noticed="rounding_head",
    ),
    of_triton(
        "head: log-sum-exp rounded before the difference",
        HEAD,
        (
            "tl.where(counts, (z.to(tl.float64) - lse).to(tl.float32), 0.0)",
            "tl.where(counts, z - lse.to(tl.float32), 0.0)",
        ),
        noticed="rounding_head",
    ),
    of_triton(
        "head: softmax sums in fp32",
        HEAD,
        (
            "m.to(tl.float64) + tl.log(s.to(tl.float64) * 2.0**-39)",
            "(m + tl.log(s.to(tl.float32) * 2.0**-39)).to(tl.float64)",
        ),
        noticed="rounding_head",
    ),
    of_triton(
        "head: gradient of the entropy first",
        HEAD,
        ("d - tl.load(GE + r) * (p * (lp + tl.load(ENT + r)))", "-p * (g + tl.load(GE + r) * (lp + tl.load(ENT + r)))"),
        noticed="rounding_head",
    ),
    # Experts: the gate's chains, the weight gradients' chains, and the tree over a token's experts.
    of_triton(
        "moe_gated: k reversed",
        GROUPED,
        ("ks = s * BLOCK_K + tl.arange(0, BLOCK_K)", "ks = (STEPS - 1 - s) * BLOCK_K + tl.arange(0, BLOCK_K)"),
        noticed="rounding_mixtures",
    ),
    of_triton(
        "moe_gradients: rows reversed",
        GROUPED,
        (
            "    for s in range(tl.cdiv((end - first).to(tl.int32), BLOCK_R)):\n",
            "    steps = tl.cdiv((end - first).to(tl.int32), BLOCK_R)\n    for s in range(steps):\n",
        ),
        (
            "i = first + s * BLOCK_R + tl.arange(0, BLOCK_R)",
            "i = first + (steps - s) * BLOCK_R - 1 - tl.arange(0, BLOCK_R)",
        ),
        noticed="rounding_mixtures",
    ),
    of_triton(
        "moe_products, moe_gradients, moe_gated: operands rounded to tf32",
        GROUPED,
        ('input_precision="ieee"', 'input_precision="tf32"', 3),
        noticed="rounding_mixtures float32",
    ),
    of_triton(
        "moe_gated: gate not rounded before silu",
        GROUPED,
        ("y = silu_times(g.to(tl.float32), u.to(tl.float32))", "y = silu_times(g_acc, u_acc)"),
        noticed="moe_gated/grouped",
    ),
    of_triton(
        "moe_combine: experts added in order",
        EXPERTS,
        ("        acc = following\n", "        acc = acc + following\n"),
        (
            "differing = _nth(order, leaf, n) ^ tl.where(more, _nth(order, leaf, n + 1), NONE)",
            "differing = _nth(order, leaf, n) * 0",
        ),
        noticed="rounding_mixtures",
    ),
    of_triton(
        "moe_combine: weighted outputs rounded",
        EXPERTS,
        ("other=0.0) * y\n", "other=0.0) * y\n        y = y.to(Y.dtype.element_ty).to(tl.float32)\n"),
        noticed="rounding_mixtures bfloat16",
    ),
    of_triton(
        "moe_weigh: product rounded before the sum",
        EXPERTS,
        (
            "tree_sum(tl.reshape(g * a, (1, BLOCK)), LEVELS)",
            "tree_sum(tl.reshape((g * a).to(D.dtype.element_ty).to(tl.float32), (1, BLOCK)), LEVELS)",
        ),
        noticed="rounding_mixtures bfloat16",
    ),
    of_triton(
        "moe_router: another tree",
        ROUTER,
        (
            "tree_sum(tl.reshape(x, (1, BLOCK)), LEVELS)",
            "tree_sum(tl.reshape(tl.trans(tl.reshape(x, (2, BLOCK // 2))), (1, BLOCK)), LEVELS)",
        ),
        noticed="rounding_mixtures",
    ),
    of_triton(
        "moe_router: weights by a reciprocal",
        ROUTER,
        (
            "weights = tl.div_rn(scores, tl.zeros_like(scores) + _total(",
            "weights = scores * tl.div_rn(scores * 0.0 + 1.0, tl.zeros_like(scores) + _total(",
        ),
        noticed="rounding_mixtures",
    ),
    of_triton(
        "moe_router: gradient divided last",
        ROUTER,
        ("dz = weights * g\n", "dz = tl.div_rn(scores * g, total)\n"),
        noticed="rounding_mixtures",
    ),
    # RMSNorm, RoPE and their fusion.
    of_triton(
        "rms_norm: multiplied by the weight first",
        NORM,
        ("(x * rstd[:, None] * w[None, :])", "(x * (rstd[:, None] * w[None, :]))"),
        noticed="rounding_norms float32",
    ),
    of_triton(
        "rms_norm: reciprocal square root of libdevice",
        NORM,
        (
            "import triton.language as tl\n",
            "import triton.language as tl\nfrom triton.language.extra import libdevice\n",
        ),
        (
            "tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, H * 1.0) + eps))",
            "libdevice.rsqrt(tl.div_rn(squares, H * 1.0) + eps)",
        ),
        noticed="rounding_norms float32, rounding_rotations float32",
    ),
    of_triton(
        "rms_norm: subnormal operands flushed",
        NORM,
        (
            "    w = _scale(W, j, H, ZERO_CENTERED)\n    rstd = _rstd(tree_sum(x * x, LEVELS), eps, H)\n",
            "    w = _scale(W, j, H, ZERO_CENTERED)\n    rstd = _rstd(tree_sum(x * x, LEVELS), eps, H)\n"
            f"    x = {flushed('x')}\n",
        ),
        noticed="rounding_norms",
    ),
    of_triton(
        "rms_norm: dx not fused",
        NORM,
        ("tl.fma(tl.broadcast_to(c * -1.0, x.shape), x, g)", "(g - c * x)"),
        noticed="rounding_norms float32, rounding_rotations float32",
    ),
    of_triton(
        "rms_norm: dweight not fused",
        NORM,
        ("tl.fma(dy, x * rstd, dw)", "(dy * (x * rstd) + dw)"),
        noticed="rounding_norms float32, rounding_rotations float32",
    ),
    of_triton(
        "rms_norm: one chain of rows for dweight",
        NORM,
        ("DW_ROWS = 16\n", "DW_ROWS = 1024\n"),
        noticed="rounding_norms float32, rounding_rotations float32",
    ),
    of_triton(
        "rms_norm: chains of 8 rows for dweight",
        NORM,
        ("DW_ROWS = 16\n", "DW_ROWS = 8\n"),
        noticed="rounding_norms float32, rounding_rotations float32",
    ),
    of_triton(
        "rms_norm: chains of dweight reversed",
        NORM,
        ("tl.store(PART + chain[:, None] * H", "tl.store(PART + (chains - 1 - chain)[:, None] * H"),
        noticed="rounding_norms float32",
    ),
    of_triton(
        "qk_norm_rope: not rounded before the rotation",
        QK,
        ("_scale(W, j, H, ZERO_CENTERED)[None, :]).to(T)\n", "_scale(W, j, H, ZERO_CENTERED)[None, :])\n"),
        noticed="rounding_rotations bfloat16",
    ),
    of_triton(
        "qk_norm_rope: rotation not fused",
        QK,
        ("tl.fma(a, cos, -(b * sin)).to(T)", "(a * cos - b * sin).to(T)"),
        noticed="rounding_rotations float32",
    ),
    of_triton(
        "qk_norm_rope: gradient's rotation not fused",
        QK,
        ("tl.fma(a, cos, -(b * s)), tl.fma(a, cos, b * s)", "a * cos - b * s, a * cos + b * s"),
        noticed="rounding_rotations float32",
    ),
    of_triton(
        "qk_norm_rope: gradient not rounded between the ops",
        QK,
        ("first, second), a).to(T).to(tl.float32)", "first, second), a)"),
        noticed="rounding_rotations bfloat16",
    ),
    of_triton(
        "qk_norm_rope: another tree",
        QK,
        (
            "squares = _squares(x, ok, j, HALF, LEVELS - 1) + _squares(x + HALF, ok, j, HALF, LEVELS - 1)",
            "squares = _squares(x, ok, tl.arange(0, BLOCK), DIM, LEVELS)",
        ),
        ("    return tree_sum(x * x, LEVELS)", "    return tl.sum(x * x, axis=1)"),
        noticed="rounding_rotations float32",
    ),
    of_triton(
        "qk_norm_rope: subnormal operands flushed",
        QK,
        ("    return (x * rstd[:, None] * _scale", f"    x = {flushed('x')}\n    return (x * rstd[:, None] * _scale"),
        noticed="rounding_rotations",
    ),
    of_triton(
        "rope: rotation not fused",
        ROPE,
        ("tl.fma(a, cos, -(b * sin))", "(a * cos - b * sin)"),
        ("tl.fma(b, cos, a * sin)", "(b * cos + a * sin)"),
        noticed="rounding_elementwise float32",
    ),
    of_triton(
        "rope: table rounded",
        ROPE,
        (
            "    if INVERSE:\n        sin = -sin\n",
            "    cos, sin = cos.to(X.dtype.element_ty).to(tl.float32), sin.to(X.dtype.element_ty).to(tl.float32)\n"
            "    if INVERSE:\n        sin = -sin\n",
        ),
        noticed="rounding_elementwise bfloat16",
    ),
    of_triton(
        "rope: subnormal operands flushed",
        ROPE,
        ("    y = Y + r[:, None] * DIM + j\n", f"    a = {flushed('a')}\n    y = Y + r[:, None] * DIM + j\n"),
        noticed="rounding_elementwise",
    ),
    # Elementwise.
    of_triton(
        "silu_mul: by a reciprocal",
        SILU,
        ("return tl.div_rn(g, 1.0 + exp(-g)) * u", "return g * tl.div_rn(g * 0.0 + 1.0, 1.0 + exp(-g)) * u"),
        noticed="rounding_elementwise float32, rounding_mixtures float32",
    ),
    of_triton(
        "silu_mul: gradient not fused",
        SILU,
        ("tl.fma(g, 1.0 - s, g * 0.0 + 1.0)", "(g * (1.0 - s) + 1.0)"),
        noticed="rounding_elementwise float32, rounding_mixtures float32",
    ),
    of_triton(
        "silu_mul: rounded before the product",
        SILU,
        (
            "silu_times(g, u).to(Y.dtype.element_ty)",
            "(silu_times(g, u * 0.0 + 1.0).to(Y.dtype.element_ty).to(tl.float32) * u).to(Y.dtype.element_ty)",
        ),
        noticed="rounding_elementwise bfloat16",
    ),
    of_triton(
        "silu_mul: subnormal gates flushed",
        SILU,
        ("    return tl.div_rn(g, 1.0", f"    g = {flushed('g')}\n    return tl.div_rn(g, 1.0"),
        noticed="rounding_elementwise",
    ),
    of_triton(
        "sigmoid_mul: by another sigmoid",
        SIGMOID,
        ("    s = 1.0 / (1.0 + exp(-gate))\n", "    s = torch.sigmoid(gate)\n", 2),
        noticed="rounding_mixtures",
    ),
    of_triton(
        "sigmoid_mul: gate rounded",
        SIGMOID,
        ("return (s[:, None] * x.float()).to(x.dtype)", "return s[:, None].to(x.dtype) * x"),
        noticed="rounding_mixtures bfloat16",
    ),
    of_triton(
        "sigmoid_mul: another tree",
        HELPERS,
        (
            "parts = parts[..., ::2] + parts[..., 1::2]",
            "parts = parts[..., : parts.shape[-1] // 2] + parts[..., parts.shape[-1] // 2 :]",
        ),
        noticed="rounding_mixtures",
    ),
    of_triton(
        "sigmoid_mul: one chain instead of the tree",
        HELPERS,
        (
            "    while parts.shape[-1] > 1:\n        parts = parts[..., ::2] + parts[..., 1::2]\n"
            "    return parts[..., 0]",
            "    total = parts[..., 0]\n    for i in range(1, n):\n        total = total + parts[..., i]\n"
            "    return total",
        ),
        noticed="rounding_mixtures",
    ),
    of_triton(
        "sigmoid_mul: subnormal operands flushed",
        SIGMOID,
        (
            "return (s[:, None] * x.float()).to(x.dtype)",
            "return (s[:, None] * torch.where(x.float().abs() < 2.0**-126, 0.0, x.float())).to(x.dtype)",
        ),
        noticed="rounding_mixtures",
    ),
    # Gated delta rule: per chunk, D continues one chain over the rows of q, then over the rows of w.
    of_triton(
        "gated_delta_rule: rows of a chunk reversed",
        DELTA,
        (
            "tl.trans(_rows_of(q, row, count, key_heads * K, 0, K, C)),\n            scaled.to(Q.dtype.element_ty),",
            "tl.trans(tl.flip(_rows_of(q, row, count, key_heads * K, 0, K, C), 0)),\n"
            "            tl.flip(scaled.to(Q.dtype.element_ty), 0),",
        ),
        noticed="gated_delta_rule",
    ),
    of_triton(
        "gated_delta_rule: w before q",
        DELTA,
        (BY_W, ""),
        ("        D = D * decay[:, None]\n", "        D = D * decay[:, None]\n" + BY_W),
        noticed="gated_delta_rule",
    ),
    of_triton(
        "gated_delta_rule: operands rounded to tf32",
        DELTA,
        ('PRECISION="ieee" if exact else "tf32"', 'PRECISION="tf32"'),
        noticed="gated_delta_rule float32",
    ),
    of_triton(
        "gated_delta_rule: dv2 not fused",
        DELTA,
        (
            "x = tl.fma(\n            tl.broadcast_to(of_dv[:, None], (C, BV)),\n            x,\n"
            "            _rows_of(dv, row, count, heads * V, first, BV, C).to(tl.float32),\n        )",
            "x = of_dv[:, None] * x\n        x += _rows_of(dv, row, count, heads * V, first, BV, C).to(tl.float32)",
        ),
        noticed="gated_delta_rule float32",
    ),
    of_triton(
        "gated_delta_rule: do scaled in two steps",
        DELTA,
        (
            "of_do = scale * tl.exp2(gates * unit)",
            "of_do = scale * tl.exp2(g_last * unit) * tl.exp2((gates - g_last) * unit)",
        ),
        noticed="gated_delta_rule float32",
    ),
    of_triton(
        "gated_delta_rule: dv2 rounded to bf16",
        DELTA,
        ("new = x.to(Q.dtype.element_ty)", "new = x.to(tl.bfloat16).to(Q.dtype.element_ty)"),
        noticed="gated_delta_rule float32",
    ),
)
