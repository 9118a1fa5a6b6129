"""The real .cu kernels of csrc/sm90/attention, run on a CPU, compared bitwise with the contract's formula.

The kernels are compiled against tests/ops/cuda_on_cpu, which emulates each instruction. The emulation covers indexing
and synchronization. It does not cover the rounding of the tensor core and of ex2. `attend` and `expected_backward`
restate docs/contract.md, "Attention" and "On Hopper GPUs", and change only with it.
"""

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from alignkit.ops.attention.cuda_backend import SPILL_BYTES, arguments, backward_function, gradients
from alignkit.runtime import built, cuda
from alignkit.runtime.families import SM90
from alignkit.testing import assert_bitwise_equal

from .helpers import UNIT as UNITS
from .helpers import assert_within

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "csrc"
BLOCK, LEAF, PAD = SM90.kv_block, SM90.kv_leaf, 128
F32, F64 = np.float32, np.float64
RESERVE = F32(SM90.reserve)


def compiled(name: str, folder: Path) -> built.Library:
    """Compile csrc/sm90/attention/{name}.cu for the CPU, and load it."""
    destination = folder / "sm90/attention"
    destination.mkdir(parents=True)
    shutil.copy(SOURCE / "interface.h", folder)
    shutil.copytree(HERE / "cuda_on_cpu", folder / "sm90", dirs_exist_ok=True)
    source, declared = destination / f"{name}.cpp", "extern __shared__ __align__(1024) uint8_t raw[];"
    files = {source: f"{name}.cu"} | {destination / header: header for header in ("heads.cuh", "backward.cuh")}
    texts = {copy: (SOURCE / "sm90/attention" / file).read_text() for copy, file in files.items()}
    assert declared in texts[destination / "backward.cuh" if name.startswith("backward") else source]
    for copy, text in texts.items():
        copy.write_text(text.replace(declared, "uint8_t* raw = machine::shared;"))
    library = folder / f"{name}.so"
    # Fortified longjmp rejects jumps to other stacks.
    options = "-O2 -std=c++20 -ffp-contract=off -fPIC -shared -U_FORTIFY_SOURCE"
    subprocess.run(["c++", *options.split(), f"-I{SOURCE.parent}", str(source), "-o", str(library)], check=True)
    return built.Library(library)


@pytest.fixture(scope="module")
def forward_library(tmp_path_factory):
    return compiled("forward", tmp_path_factory.mktemp("on_cpu"))


@pytest.fixture
def kernel(forward_library, monkeypatch):
    """Return a function that runs the forward kernel, with workspace for `blocks` CTAs, and returns the error code."""
    monkeypatch.setattr(cuda, "library", lambda: forward_library)

    def forward(a, blocks: int = 2) -> int:
        size = SPILL_BYTES.get(a.dim, 0) * blocks
        joined = torch.full((size // 4,), float("nan"))
        return forward_library.alignkit_attention_forward(ctypes.byref(a), joined, size, None)

    return forward


@pytest.fixture(scope="module")
def backward_libraries(tmp_path_factory):
    files = {"alignkit_attention_backward": "backward", "alignkit_attention_backward_256": "backward_256"}
    return {name: compiled(file, tmp_path_factory.mktemp("on_cpu")) for name, file in files.items()}


@pytest.fixture
def backward(backward_libraries, monkeypatch):
    """Return a function that runs the backward kernel on its arguments and returns the error code."""
    monkeypatch.setattr(cuda, "library", lambda: backward_libraries["alignkit_attention_backward"])

    def run(a) -> int:
        name = backward_function(a.dim)
        return getattr(backward_libraries[name], name)(ctypes.byref(a), None)

    return run


libm = ctypes.CDLL("libm.so.6")
for function in ("exp2f", "log2f"):
    getattr(libm, function).restype = ctypes.c_float
    getattr(libm, function).argtypes = [ctypes.c_float]


def each(function):
    """Return a libm function applied to each element of an array."""
    return lambda x: np.vectorize(getattr(libm, function), otypes=[F32])(x)


def ex2(x):
    y = each("exp2f")(x)
    return np.where(np.abs(y) < F32(2.0**-126), F32(0), y)


def fma(a, b, c):
    """Return a * b + c rounded once to fp32: the product is exact in float64, and the sum is rounded to odd there."""
    a, b, c = np.broadcast_arrays(*(np.asarray(x, F64) for x in (a, b, c)))
    product = a * b
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(np.int64).copy()
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    up = (error > 0) == (total > 0)
    bits[inexact] += np.where(up[inexact], 1, -1)
    return bits.view(F64).astype(F32)


def chain(a, b, acc):
    """Return acc [m, n] + a [m, k] @ b [n, k]^T in steps of k = 16, each added in float64 and rounded once."""
    a, b = a.astype(F64), b.astype(F64)
    for begin in range(0, a.shape[1], 16):
        total = acc.astype(F64)
        for k in range(begin, min(begin + 16, a.shape[1])):
            total = total + a[:, k, None] * b[None, :, k]
        acc = total.astype(F32)
    return acc


def attend(q, k, v, context, factor):
    """Return fp32 results and statistics of q [n, D], at positions from `context` on, over k, v [context + n, D]."""
    n, dim = q.shape
    pos, factor = context + np.arange(n), F32(factor)
    Z, L, A = np.zeros(n, F32), np.zeros(n, F32), np.zeros((n, dim), F32)
    for leaf in range(0, len(k), LEAF):
        shift, sums, acc = np.zeros(n, F32), np.zeros((n, 1), F32), np.zeros((n, dim), F32)
        for b in range(leaf, min(leaf + LEAF, len(k)), BLOCK):
            kb, vb = (np.zeros((BLOCK, dim), F32) for _ in range(2))
            count = min(BLOCK, len(k) - b)
            kb[:count], vb[:count] = k[b : b + count], v[b : b + count]
            score, seen = chain(q, kb, np.zeros((n, BLOCK), F32)), b <= pos
            if b == leaf:
                shift = fma(-score[:, 0], factor, -RESERVE)
            score = np.where(b + np.arange(BLOCK)[None] <= pos[:, None], score, F32(-np.inf))
            top = np.fmax.reduce(score, axis=1)
            moves = seen & (rounded(ex2(fma(top, factor, shift))) >= 2)
            new_shift = np.where(moves, fma(-top, factor, -RESERVE), shift)
            alpha = np.where(moves, ex2(new_shift - shift), F32(1))[:, None]
            p, shift = rounded(ex2(fma(score, factor, new_shift[:, None]))), new_shift
            acc = np.where(seen[:, None], chain(p, vb.T, acc * alpha), acc)
            ones = np.ones((1, BLOCK), F32)
            sums = np.where(seen[:, None], chain(p, ones, sums * alpha), sums)
        if leaf == 0:
            Z, L, A = shift, sums[:, 0], acc
            continue
        new_shift, seen = np.where(Z - shift <= RESERVE, Z, shift), leaf <= pos
        before, after = ex2(new_shift - Z), ex2(new_shift - shift)
        L = np.where(seen, fma(sums[:, 0], after, L * before), L)
        A = np.where(seen[:, None], fma(acc, after[:, None], A * before[:, None]), A)
        Z = np.where(seen, new_shift, Z)
    return A / (L[:, None] + A * 0), Z - each("log2f")(L)


def rounded(p):
    return torch.from_numpy(p).bfloat16().float().numpy()


def random_bf16(rows, heads, dim, seed, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, heads, dim, generator=generator) * spread).bfloat16()


def expected_forward(q, k, v, context, factor):
    """Return a sequence's expected result [n, heads, D] and statistics [heads, n]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (t.float().numpy() for t in (q, k, v))
    with np.errstate(all="ignore"):
        heads = [attend(q[:, h], k[:, h // group], v[:, h // group], context, factor) for h in range(q.shape[1])]
    return torch.from_numpy(np.stack([o for o, _ in heads], 1)).bfloat16(), np.stack([s for _, s in heads])


@pytest.mark.parametrize(
    "dim,heads,kv,together,lens",
    [
        (128, 2, 1, 1, [1, 64, 0, 130, 3]),
        (128, 3, 1, 3, [65, 70]),
        (128, 1, 1, 1, [600]),
        (128, 1, 1, 1, [1100]),
        (64, 2, 2, 1, [193, 1, 100]),
        (64, 5, 1, 5, [40, 530]),
        (64, 1, 1, 1, [1090]),
        (96, 2, 1, 1, [130, 1, 65]),
        (96, 3, 1, 3, [70, 200]),
        (96, 1, 1, 1, [1090]),
        (256, 2, 1, 1, [1, 64, 0, 130, 3]),
        (256, 3, 1, 3, [65, 70]),
        (256, 1, 1, 1, [600]),
        (256, 1, 1, 1, [1090]),
    ],
)
def test_packed_batches_match_the_contract(kernel, dim, heads, kv, together, lens):
    total = sum(lens)
    q, k, v = random_bf16(total, heads, dim, 1), random_bf16(total, kv, dim, 2), random_bf16(total, kv, dim, 3)
    starts = torch.tensor([0, *lens]).cumsum(0)
    if together > 1:
        starts = starts.int()
        k = torch.cat([k, k], -1)[..., :dim]  # strided
    v[-1, 0, 5] = float("inf")  # another sequence's zeros must not multiply it
    out, pads = torch.full_like(q, 7.0), total // PAD + len(lens) + 1
    shift = torch.full((heads, pads * PAD), float("-inf"))
    a = arguments(q, k, v, out, starts, dim**-0.5, together, shift=shift, pads=pads)
    assert kernel(a) == 0
    expected = torch.full_like(shift, float("-inf"))
    for s, n in enumerate(lens):
        rows = slice(int(starts[s]), int(starts[s]) + n)
        if n == 0:
            continue
        result, statistics = expected_forward(q[rows], k[rows], v[rows], 0, a.factor)
        if s == len(lens) - 1:  # rows where an infinity is multiplied by 0 are NaN; which rows depends on the tile
            n -= min(n, BLOCK)
            result = result[:n]
        assert_bitwise_equal(out[rows][:n], result[:n], f"sequence {s}")
        pad = (int(starts[s]) // PAD + s) * PAD
        expected[:, pad : pad + lens[s]] = torch.from_numpy(statistics)
    assert_bitwise_equal(shift, expected, "statistics")


def cache(kv, dim, page, lens):
    """Return K cache, V cache, block table, lengths, and the (k, v) of each sequence; unused cache rows are NaN."""
    need = [-(-n // page) for n in lens]
    blocks, width = sum(need) + 2, max(need) + 1
    rows = torch.full((blocks * page, kv, 2 * dim), float("nan"), dtype=torch.bfloat16)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(7))[: sum(need)].split(need)
    table = torch.full((len(lens), width), -1, dtype=torch.int32)
    keys = [(random_bf16(n, kv, dim, 10 + i), random_bf16(n, kv, dim, 20 + i)) for i, n in enumerate(lens)]
    for row, pages, (k, v) in zip(table, order, keys, strict=True):
        row[: len(pages)] = pages.int()
        positions = torch.arange(len(k))
        rows[pages[positions // page] * page + positions % page] = torch.cat([k, v], -1)
    return *rows.chunk(2, dim=-1), table, torch.tensor(lens), keys


@pytest.mark.parametrize(
    "dim,heads,kv,page,together,shapes",
    [
        (128, 4, 2, 16, 2, [(20, 100), (3, 0), (70, 7)]),
        (128, 7, 1, 48, 7, [(30, 500), (19, 64)]),
        (128, 1, 1, 64, 1, [(140, 450)]),
        (64, 2, 1, 32, 2, [(100, 31), (17, 1)]),
        (96, 4, 2, 16, 2, [(20, 100), (3, 0), (70, 7)]),
        (96, 1, 1, 64, 1, [(140, 450)]),
        (256, 2, 1, 32, 2, [(20, 100), (3, 0), (70, 7)]),
        (256, 1, 1, 16, 1, [(70, 1010)]),
    ],
)
def test_paged_batches_match_the_contract(kernel, dim, heads, kv, page, together, shapes):
    """`shapes` holds (queries, context) of each sequence; the kernel skips sequences with at most 4 queries."""
    takes = [n for n, _ in shapes]
    k, v, table, seq_lens, keys = cache(kv, dim, page, [n + context for n, context in shapes])
    total = sum(takes)
    q = random_bf16(total + 3, heads, dim, 5)
    starts = torch.tensor([0, *takes]).cumsum(0).int()
    out = torch.full_like(q, 7.0)
    paging = {"kv_len": seq_lens, "table": table, "page": page, "most": 4}
    a = arguments(q, k, v, out, starts, dim**-0.5, together, **paging)
    a.few, a.far = 18, 1 << 20
    assert kernel(a) == 0
    for s, ((n, context), (ks, vs)) in enumerate(zip(shapes, keys, strict=True)):
        rows = slice(int(starts[s]), int(starts[s]) + n)
        result = expected_forward(q[rows], ks, vs, context, a.factor)[0] if n > 4 else torch.full_like(q[rows], 7.0)
        assert_bitwise_equal(out[rows], result, f"sequence {s}")
    assert_bitwise_equal(out[total:], torch.full_like(out[total:], 7.0), "rows of no sequence")


def test_division_near_both_ends_of_the_range(kernel):
    """Divisors lie on both sides of 1, because the product of score and factor is rounded."""
    lens, heads, dim = [1] * 40 + [70], 2, 64
    total = sum(lens)
    q, k, v = (random_bf16(total, heads, dim, i) for i in range(3))
    q[:40] *= 700.0
    k[:40] *= 700.0  # scores whose product with a factor is off by tenths
    v[:40] = (v[:40].float().sign() * 3.38e38).bfloat16()
    v[40:, 0] *= 2.0**-126
    v[40:, 1, ::3] = 0.0
    starts = torch.tensor([0, *lens]).cumsum(0)
    out, shift = torch.zeros_like(q), torch.zeros(heads, (total // PAD + len(lens) + 1) * PAD)
    a = arguments(q, k, v, out, starts, dim**-0.5, 1, shift=shift, pads=shift.shape[1] // PAD)
    assert kernel(a) == 0
    for s, n in enumerate(lens):
        rows = slice(int(starts[s]), int(starts[s]) + n)
        result, _ = expected_forward(q[rows], k[rows], v[rows], 0, a.factor)
        known = ~result.isnan()  # an overflow before the division gives NaN, whose payload torch changes
        assert bool((out[rows].isnan() == result.isnan()).all())
        assert_bitwise_equal(out[rows][known], result[known], f"sequence {s}")


def test_infinite_and_nan_scores_make_only_their_rows_nan(kernel):
    """A row is NaN if it has a score of inf or NaN, or only scores of -inf in a block."""
    n, dim = 700, 64
    q, k, v = (random_bf16(n, 1, dim, i) for i in range(3))
    q[:, :, 7] = torch.where(torch.arange(n)[:, None] % 3 == 0, 1.0, -1.0).bfloat16()
    k[512:640, 0, 7] = float("inf")  # the second leaf's first block: +inf for a third of the rows, else -inf
    k[3, 0, 7] = float("-inf")
    k[690, 0, 8] = float("nan")
    starts, out = torch.tensor([0, n]), torch.zeros_like(q)
    a = arguments(q, k, v, out, starts, dim**-0.5, 1)
    assert kernel(a) == 0
    result, _ = expected_forward(q, k, v, 0, a.factor)
    known = ~result.isnan()
    assert bool((out.isnan() == result.isnan()).all())
    assert bool(known[:3].all()) and not bool(known[690:].any()) and not bool(known[512:].any())
    assert bool(known[3:512][torch.arange(3, 512) % 3 == 0].all()) and not bool(known[4:6].any())
    assert_bitwise_equal(out[known], result[known])


def heights(n):
    """Return scores [n] around the thresholds at which the shift changes.

    Within a leaf, scores exceed the first by slightly less than the reserve, slightly more, and again as much. A leaf's
    first score exceeds earlier ones by less than the reserve or by more, or lies far below them.
    """
    height = torch.zeros(n)  # exponents of 2
    for position, value in (
        (130, 31.5),
        (131, 32.5),
        (260, 50.0),
        (300, 66.0),
        (512, 30.0),
        (600, 62.5),
        (1024, 62.5),
        (1536, -90.0),
    ):
        height[position] = value
    height[2048:], height[2560:] = 80.0, 210.0
    return (height / 1.4426950408889634).bfloat16()


@pytest.mark.parametrize("dim", [128, pytest.param(256, marks=pytest.mark.matrix)])
def test_shift_changes_match_the_contract(kernel, dim):
    n = 2700
    q, k, v = torch.ones(n, 1, dim).bfloat16(), torch.zeros(n, 1, dim).bfloat16(), random_bf16(n, 1, dim, 3)
    k[:, 0, 0] = heights(n)
    starts, out, shift = torch.tensor([0, n]), torch.zeros_like(q), torch.zeros(1, (n // PAD + 2) * PAD)
    a = arguments(q, k, v, out, starts, 1.0, 1, shift=shift, pads=shift.shape[1] // PAD)
    assert kernel(a) == 0
    result, statistics = expected_forward(q, k, v, 0, a.factor)
    assert_bitwise_equal(out, result)
    assert_bitwise_equal(shift[:, :n], torch.from_numpy(statistics))
    # Bounds against float64: n probabilities are rounded, in the sums of values and in their own sum; exponents up to
    # 210 have errors of a few last bits; out is rounded.
    scores = k[:, 0, 0].double().expand(n, n).masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    off = UNITS[torch.bfloat16] + n * 2.0**-23 + 8 * 210 * 2.0**-24
    assert_within(shift[0, :n] * -math.log(2), scores.logsumexp(-1), off, "logarithms")
    p, values = scores.softmax(-1), v[:, 0].double()
    assert_within(out[:, 0], p @ values, (2 * off + UNITS[torch.bfloat16]) * (p @ values.abs()), "out")


def test_wrong_starts_give_nan(kernel):
    """The whole packed batch is NaN."""
    q = random_bf16(50, 2, 64, 1)
    for starts in ([0, 20, 49], [1, 20, 50], [0, 20, 51], [0]):
        out, shift = torch.zeros_like(q), torch.zeros(2, 8 * PAD)
        a = arguments(q, q, q, out, torch.tensor(starts), 1.0, 1, shift=shift, pads=8)
        assert kernel(a) == 0
        assert out.isnan().all() and not shift.any()


def statistics(q, k, v, g, lens, pads, factor):
    """Return shift and delta [heads, pads * PAD], as the forward and the delta kernel write them."""
    heads = q.shape[1]
    shift, delta = torch.full((heads, pads * PAD), float("-inf")), torch.zeros(heads, pads * PAD)
    begin = 0
    for s, n in enumerate(lens):
        rows, offset = slice(begin, begin + n), (begin // PAD + s) * PAD
        if n:
            out, own = expected_forward(q[rows], k[rows], v[rows], 0, factor)
            shift[:, offset : offset + n] = torch.from_numpy(own)
            delta[:, offset : offset + n] = (g[rows].float() * out.float()).sum(-1).t()
        begin += n
    return shift, delta


def expected_backward(q, k, v, g, shift, delta, factor, scale):
    """Return dq, dk and dv of a sequence from q, g [n, heads, D], k, v [n, kv, D], shift and delta [heads, n]."""
    n, group = q.shape[0], q.shape[1] // k.shape[1]
    factor, scale = F32(factor), F32(scale)
    q, k, v, g = (t.float().numpy() for t in (q, k, v, g))
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    zeros, causal = np.zeros((n, n), F32), np.tri(n, dtype=bool)
    for h in range(q.shape[1]):
        hk = h // group
        p = ex2(fma(chain(q[:, h], k[:, hk], zeros), factor, shift[h, :, None]))
        p = np.where(causal, p, F32(0))
        ds = p * (chain(g[:, h], v[:, hk], zeros) - delta[h, :, None])
        p, ds = (torch.from_numpy(t).bfloat16().float().numpy() for t in (p, ds))
        dq[:, h] = chain(ds, k[:, hk].T, dq[:, h]) * scale
        dv[:, hk] = chain(p.T, g[:, h].T, dv[:, hk])
        dk[:, hk] = chain(ds.T, q[:, h].T, dk[:, hk])
    return [torch.from_numpy(t).bfloat16() for t in (dq, dk * scale, dv)]


@pytest.mark.parametrize(
    "dim,heads,kv,lens",
    [
        (128, 2, 1, [1, 64, 0, 130, 3]),
        (128, 3, 3, [65, 128, 127]),
        (128, 1, 1, [600]),
        (64, 4, 2, [193, 1, 100]),
        (64, 5, 1, [40, 530]),
        (64, 1, 1, [5] * 40 + [260]),
        (96, 2, 1, [1, 64, 0, 130, 3]),
        (96, 3, 3, [65, 128, 127]),
        (96, 2, 1, [300]),
        (256, 2, 1, [1, 64, 0, 130, 3]),
        (256, 3, 3, [65, 128, 127]),
        (256, 2, 1, [300, 63, 5]),
    ],
)
def test_backward_matches_the_contract(backward, dim, heads, kv, lens):
    total = sum(lens)
    q, g = random_bf16(total, heads, dim, 1), random_bf16(total, heads, dim, 4, 1.0)
    k, v = random_bf16(total, kv, dim, 2), random_bf16(total, kv, dim, 3)
    starts = torch.tensor([0, *lens]).cumsum(0)
    if kv > 1:
        starts = starts.int()
        k, q = (torch.cat([t, t], -1)[..., :dim] for t in (k, q))  # strided
    scale, pads = dim**-0.5, total // PAD + len(lens) + 1
    grads = [torch.full(t.shape, 7.0, dtype=t.dtype) for t in (q, k, v)]
    shift, delta = torch.zeros(heads, pads * PAD), torch.zeros(heads, pads * PAD)
    a = gradients(q, k, v, g, shift, delta, grads, starts, scale)
    known = statistics(q, k, v, g, lens, pads, a.factor)
    shift.copy_(known[0])
    delta.copy_(known[1])
    last = int(starts[-2])
    for t in (q, k, v, g):  # NaN of the last sequence must not reach another
        if len(lens) > 1:
            t[last:] = float("nan")
    assert backward(a) == 0
    for s, n in enumerate(lens):
        rows, begin = slice(int(starts[s]), int(starts[s]) + n), (int(starts[s]) // PAD + s) * PAD
        if n == 0 or (s and s == len(lens) - 1):
            continue
        shifts, sums = (t[:, begin : begin + n].numpy() for t in (shift, delta))
        expected = expected_backward(q[rows], k[rows], v[rows], g[rows], shifts, sums, a.factor, a.scale)
        for name, got, want in zip(("dq", "dk", "dv"), grads, expected, strict=True):
            assert_bitwise_equal(got[rows], want, f"{name}, sequence {s}")


def test_backward_with_wrong_starts_gives_nan(backward):
    q, statistics = random_bf16(50, 2, 64, 1), torch.zeros(2, 8 * PAD)
    for starts in ([0, 20, 49], [1, 20, 50], [0, 20, 51], [0]):
        grads = [torch.zeros_like(q) for _ in range(3)]
        a = gradients(q, q, q, q, statistics, statistics, grads, torch.tensor(starts), 1.0)
        assert backward(a) == 0
        assert all(t.isnan().all() for t in grads)
