"""The state backward of the gated delta rule: bits, error bounds, gradients of the whole rule, and invalid input.

Backends are compared with each other and with the reference. flash-linear-attention, if installed, calls the op through
its registry.
"""

import inspect
import itertools
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from alignkit.errors import InputError
from alignkit.ops.gated_delta_rule import CHUNK, chunk_gated_delta_rule_bwd_dhu, fla, reference
from alignkit.runtime import cuda, dispatch
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU, EXP, SMALLEST, U32, UNIT, assert_within, gamma, seeds

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MODES = ("", "g", "gk", "g gk")
BACKENDS = ["auto"] if CPU else ["triton", *(["cuda"] if cuda.available() else [])]
DIMS = (64, 128) if CPU else (64, 128, 256)
COMPILED = (
    ((64, 64), "g gk", BF16, False, True),
    ((128, 128), "g", FP16, True, False),
    ((256, 64), "", BF16, False, True),
    ((64, 256), "gk", FP16, True, True),
    ((64, 128), "g gk", FP32, True, True),
    ((256, 64), "", FP32, False, False),
)
"""(K, V), gates, dtype, state_v_first, dht given: the only cases for Triton, which compiles for each of them."""


def gpu(test):
    skip = pytest.mark.skipif(CPU, reason="needs a GPU")
    return pytest.mark.gpu(skip(test))


@pytest.fixture(params=BACKENDS)
def backend(request):
    with dispatch.use(request.param):
        yield request.param


def problem(
    t=130,
    heads=2,
    key_heads=1,
    k_dim=64,
    v_dim=64,
    batch=1,
    mode="g gk",
    dtype=None,
    starts=None,
    v_first=False,
    dht=True,
    seed=0,
):
    """Return the op's arguments as two dicts: tensors with a row per token, and the others."""
    torch.manual_seed(seed)
    dtype = dtype or (FP32 if CPU else BF16)
    q, k = (torch.randn(batch, t, key_heads, k_dim) / k_dim**0.5 for _ in range(2))
    w = torch.randn(batch, t, heads, k_dim) / k_dim**0.5 / 2
    do, dv = (torch.randn(batch, t, heads, v_dim) for _ in range(2))
    rows = {name: x.to(dtype) for name, x in zip(("q", "k", "w", "do", "dv"), (q, k, w, do, dv), strict=True)}
    edges = [0, t] if starts is None else starts
    place = torch.cat([torch.arange(b - a) % CHUNK for a, b in pairwise(edges)]) + 1
    if "g" in mode.split():
        rows["g"] = -place[:, None] * torch.rand(batch, t, heads) / 50
    if "gk" in mode:
        rows["gk"] = -place[:, None, None] * torch.rand(batch, t, heads, k_dim) / 50
    count = batch if starts is None else len(starts) - 1
    rest = {"state_v_first": v_first, "need_dh0": True}
    if dht:
        rest["dht"] = torch.randn(count, heads, *((v_dim, k_dim) if v_first else (k_dim, v_dim)))
    if starts is not None:
        rest["cu_seqlens"] = torch.tensor(starts)
    return rows, rest


def run(rows, rest):
    return chunk_gated_delta_rule_bwd_dhu(**rows, **rest)


def assert_same(got, want, what):
    for name, a, b in zip(("dh", "dh0", "dv2"), got, want, strict=True):
        assert (a is None) == (b is None), f"{what}: {name}"
        if a is not None:
            assert_bitwise_equal(a, b, f"{what}: {name}")


def bounds(rows, rest, sequence, begin, end, head, scale, dtype):
    """Return float64 results of one sequence and head, with error bounds for a result rounded to `dtype`.

    Returns:
        A list of (dh, bound, dv2, bound) per chunk, last chunk first, and (dh0, bound).
    """
    u, tiny = UNIT[dtype], SMALLEST[dtype]
    group = rows["do"].shape[2] // rows["q"].shape[2]
    exp = torch.exp2 if rest.get("base2") else torch.exp

    def chunk_rows(name, first, heads_each=1):
        return rows[name][0, first : min(first + CHUNK, end), head // heads_each].double()

    def error(x, e, rel):
        """Return the error bound of x with error e after an operation with relative error `rel`."""
        return e + rel * (x.abs() + e)

    D = torch.zeros(rows["q"].shape[3], rows["do"].shape[3], dtype=torch.float64)
    if "dht" in rest:
        D += rest["dht"][sequence, head].double().t() if rest["state_v_first"] else rest["dht"][sequence, head].double()
    E, found = torch.zeros_like(D), []
    sums = 4 * gamma(2 * CHUNK + D.shape[0])  # error of the products; the tensor core truncates
    for first in reversed(range(begin, end, CHUNK)):
        q, k, w, do, dv = (
            chunk_rows("q", first, group),
            chunk_rows("k", first, group),
            chunk_rows("w", first),
            chunk_rows("do", first),
            chunk_rows("dv", first),
        )
        one, two, decay = 1.0, 1.0, torch.ones(len(D), 1, dtype=torch.float64)
        if "g" in rows:
            g = chunk_rows("g", first)
            one, two, decay = exp(g[-1] - g)[:, None], exp(g)[:, None], exp(g[-1]) * decay
        if "gk" in rows:
            decay = decay * exp(chunk_rows("gk", first)[-1])[:, None]
        D_error = error(D, E, u) + tiny
        x, x_error = k @ D, k.abs() @ D_error + sums * (k.abs() @ (D.abs() + D_error))
        dv2 = dv + one * x
        dv2_error = error(dv2, error(one * x, one * x_error, EXP + 2 * U32), u + U32) + tiny
        found.append((D, D_error, dv2, dv2_error))
        scaled, scaled_error = scale * two * do, error(scale * two * do, 0.0, EXP + 2 * U32 + u) + tiny
        parts = (decay * D).abs() + q.abs().t() @ scaled.abs() + w.abs().t() @ dv2.abs()
        E = error(decay * D, decay * E, 2 * EXP + 4 * U32) + q.abs().t() @ scaled_error + w.abs().t() @ dv2_error
        E = E + sums * (parts + E)
        D = decay * D + q.t() @ scaled - w.t() @ dv2
    return found, (D, E)


def check(got, rows, rest):
    """Check results against float64."""
    dh, dh0, dv2 = got
    starts = rest["cu_seqlens"].tolist() if "cu_seqlens" in rest else [0, rows["q"].shape[1]]
    scale, chunk = rest.get("scale") or rows["q"].shape[3] ** -0.5, 0
    if rest["state_v_first"]:
        dh, dh0 = dh.transpose(-1, -2), dh0.transpose(-1, -2)
    for i, (begin, end) in enumerate(pairwise(starts)):
        chunks = range(chunk, chunk - (begin - end) // CHUNK)
        chunk = chunks.stop
        for head in range(dh.shape[2]):
            found, (want, bound) = bounds(rows, rest, i, begin, end, head, scale, rows["q"].dtype)
            assert len(found) == len(chunks)
            assert_within(dh0[i, head], want, bound, f"dh0, sequence {i}")
            for j, (want, bound, want_dv2, bound_dv2) in zip(reversed(chunks), found, strict=True):
                assert_within(dh[0, j, head], want, bound, f"dh, sequence {i}, chunk {j}")
                first = begin + (j - chunks.start) * CHUNK
                new = dv2[0, first : min(first + CHUNK, end), head]
                assert_within(new, want_dv2, bound_dv2, f"dv2, sequence {i}, chunk {j}")


def random_starts(data, most=4):
    lengths = st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 200])
    ends = torch.tensor(data.draw(st.lists(lengths, min_size=1, max_size=most))).cumsum(0, dtype=torch.int64)
    return [0, *ends.tolist()]


def kinds(backend):
    """Return a strategy for cases of a backend, in the form of COMPILED."""
    if backend == "triton":
        return st.sampled_from(COMPILED)
    dtypes = [BF16, FP16] if backend == "cuda" else [FP32, BF16, FP16]  # the CUDA backend uses Triton for fp32
    dim = st.sampled_from(DIMS)
    return st.tuples(st.tuples(dim, dim), st.sampled_from(MODES), st.sampled_from(dtypes), st.booleans(), st.booleans())


@given(data=st.data(), seed=seeds)
def test_error_is_within_bounds(backend, data, seed):
    starts = random_starts(data)
    key_heads = data.draw(st.sampled_from([1, 2]))
    dims, mode, dtype, v_first, dht = data.draw(kinds(backend))
    rows, rest = problem(
        starts[-1],
        data.draw(st.sampled_from([1, 3])) * key_heads,
        key_heads,
        *dims,
        mode=mode,
        starts=starts,
        seed=seed,
        dtype=dtype,
        v_first=v_first,
        dht=dht,
    )
    rest |= {"base2": data.draw(st.booleans())}
    if data.draw(st.booleans()):
        rest["scale"] = 0.3
    check(run(rows, rest), rows, rest)


@given(data=st.data(), seed=seeds)
def test_packed_equals_dense(backend, data, seed):
    """A sequence does not depend on its neighbors, its place or the number of earlier chunks."""
    starts = random_starts(data)
    rows, rest = problem(starts[-1], mode=data.draw(st.sampled_from(["", "g gk"])), starts=starts, seed=seed)
    dh, dh0, dv2 = run(rows, rest)
    chunk = 0
    for i, (begin, end) in enumerate(pairwise(starts)):
        chunks = -(-(end - begin) // CHUNK)
        alone = run(
            {name: t[:, begin:end] for name, t in rows.items()}, {"dht": rest["dht"][i : i + 1], "need_dh0": True}
        )
        assert_same((dh[:, chunk : chunk + chunks], dh0[i : i + 1], dv2[:, begin:end]), alone, f"sequence {i}")
        chunk += chunks


def test_batch_entries_and_heads_are_independent(backend):
    rows, rest = problem(150, 4, 2, batch=3)
    dh, dh0, dv2 = run(rows, rest)
    for b in range(3):
        for pair in range(2):
            heads = slice(2 * pair, 2 * pair + 2)
            some = {
                name: t[b : b + 1, :, pair : pair + 1] if name in ("q", "k") else t[b : b + 1, :, heads]
                for name, t in rows.items()
            }
            assert_same(
                (dh[b : b + 1, :, heads], dh0[b : b + 1, heads], dv2[b : b + 1, :, heads]),
                run(some, rest | {"dht": rest["dht"][b : b + 1, heads]}),
                f"batch {b}, heads {pair}",
            )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_neighbors_change_no_bit(backend, bad):
    starts = [0, 70, 100, 165]
    rows, rest = problem(165, starts=starts)
    want = run(rows, rest)
    for name in rows:
        rows[name][:, 70:100] = bad
    dh, dh0, dv2 = run(rows, rest)
    for chunks in (slice(0, 2), slice(3, 5)):
        assert_bitwise_equal(dh[:, chunks], want[0][:, chunks], "dh")
    for i in (0, 2):
        assert_bitwise_equal(dh0[i], want[1][i], "dh0")
        assert_bitwise_equal(dv2[:, starts[i] : starts[i + 1]], want[2][:, starts[i] : starts[i + 1]], "dv2")


def test_empty_sequences(backend):
    rows, rest = problem(70, starts=[0, 0, 70, 70])
    dh, dh0, dv2 = run(rows, rest)
    assert dh.shape[1] == 2
    for i in (0, 2):
        assert torch.equal(dh0[i], rest["dht"][i])
    alone = run(rows, {"dht": rest["dht"][1:2], "need_dh0": True})
    assert_same((dh, dh0[1:2], dv2), alone, "between empty ones")


def test_state_layouts_have_the_same_bits(backend):
    rows, rest = problem(130, k_dim=128)
    dh, dh0, dv2 = run(rows, rest)
    transposed = run(rows, rest | {"state_v_first": True, "dht": rest["dht"].transpose(-1, -2)})
    assert_same(
        (dh, dh0, dv2),
        (transposed[0].transpose(-1, -2), transposed[1].transpose(-1, -2), transposed[2]),
        "state_v_first",
    )


def test_strided_inputs_have_the_same_bits(backend):
    rows, rest = problem(130)
    strided = {
        name: torch.cat([t, t], 1)[:, :130] if name == "w" else t.transpose(1, 2).contiguous().transpose(1, 2)
        for name, t in rows.items()
    }
    assert_same(run(strided, rest), run(rows, rest), "strided")


def poisoned(t):
    return t.fill_(float("nan") if t.is_floating_point() else 77)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("starts", [None, [0, 1, 65, 129, 200]])
def test_every_element_is_written(backend, mode, starts, monkeypatch):
    rows, rest = problem(200, mode=mode, starts=starts, batch=1 if starts else 2)
    want = run(rows, rest)
    empty, new_empty = torch.empty, torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **kw: new_empty(*a, **kw).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: poisoned(empty(*a, **kw)))
    got = run(rows, rest)
    assert_same(got, want, "poisoned")
    assert not any(t.isnan().any() for t in got)


# The whole rule.


def recurrence(q, k, v, beta, log_decay, h0, scale):
    """Compute the rule token by token, with log_decay [T] or [T, K]; return outputs and the final state."""
    S, out = h0, []
    for t in range(len(q)):
        S = S * log_decay[t].exp().reshape(-1, 1)
        S = S + torch.outer(k[t], beta[t] * (v[t] - k[t] @ S))
        out.append(scale * (q[t] @ S))
    return torch.stack(out), S


def chunk_step(q, k, w, u, gates, S, scale):
    """Return a chunk's outputs and the next state; `gates` [C] or [C, K] are cumulative sums."""
    G = gates if gates.ndim == 2 else gates[:, None]
    attention = ((q[:, None] * k[None] * (G[:, None] - G[None]).clamp(max=0.0).exp()).sum(-1)).tril()
    new = u - w @ S
    return (
        scale * ((q * G.exp()) @ S + attention @ new),
        G[-1].exp().reshape(-1, 1) * S + (k * (G[-1] - G).exp()).t() @ new,
    )


class States(torch.autograd.Function):
    """The chunked rule of one head; the op computes the state's backward, autograd the rest within each chunk."""

    @staticmethod
    def forward(ctx, q, k, w, u, gates, h0, scale):
        ctx.save_for_backward(q, k, w, u, gates, h0)
        ctx.scale = scale
        out, S = [], h0
        for first in range(0, len(q), CHUNK):
            o, S = chunk_step(*(t[first : first + CHUNK] for t in (q, k, w, u, gates)), S, scale)
            out.append(o)
        return torch.cat(out), S

    @staticmethod
    def backward(ctx, do, dht):
        q, k, w, u, gates, h0 = ctx.saved_tensors
        starts, states, local = range(0, len(q), CHUNK), [h0], []
        for first in starts:
            here = [t[first : first + CHUNK] for t in (q, k, w, u, gates)]
            states.append(chunk_step(*here, states[-1], ctx.scale)[1])
            with torch.enable_grad():  # gradient of the new values within the chunk
                new = here[3].clone().requires_grad_()
                o, _ = chunk_step(here[0], here[1], torch.zeros_like(here[2]), new, here[4], states[-2], ctx.scale)
            local.append(torch.autograd.grad(o, new, do[first : first + CHUNK])[0])
        q_, k_, gate = q, k, {"g": gates[None, :, None]}
        if gates.ndim == 2:
            last = torch.cat(
                [gates[first : first + CHUNK][-1:].expand(len(gates[first : first + CHUNK]), -1) for first in starts]
            )
            q_, k_, gate = q * gates.exp(), k * (last - gates).exp(), {"gk": gates[None, :, None]}
        dh, dh0, dv2 = chunk_gated_delta_rule_bwd_dhu(
            *(t[None, :, None] for t in (q_, k_, w, do, torch.cat(local))),
            **gate,
            dht=dht[None, None],
            scale=ctx.scale,
            need_dh0=True,
        )
        grads = []
        for i, first in enumerate(starts):
            with torch.enable_grad():
                leaves = [t[first : first + CHUNK].clone().requires_grad_() for t in (q, k, w, gates)]
                outs = chunk_step(*leaves[:3], u[first : first + CHUNK], leaves[3], states[i], ctx.scale)
            grads.append(torch.autograd.grad(outs, leaves, (do[first : first + CHUNK], dh[0, i, 0])))
        dq, dk, dw, dgates = (torch.cat(g) for g in zip(*grads, strict=True))
        return dq, dk, dw, dv2[0, :, 0], dgates, dh0[0, 0], None


def chunked(q, k, v, beta, log_decay, h0, scale):
    """Compute the results of `recurrence` in chunks, with `States`."""
    W, U, gates = [], [], []
    for first in range(0, len(q), CHUNK):
        k_, v_, b = k[first : first + CHUNK], v[first : first + CHUNK], beta[first : first + CHUNK, None]
        summed = log_decay[first : first + CHUNK].cumsum(0)
        G = summed if summed.ndim == 2 else summed[:, None]
        A = (b * (k_[:, None] * k_[None] * (G[:, None] - G[None]).clamp(max=0.0).exp()).sum(-1)).tril(-1)
        inverse = torch.linalg.inv(torch.eye(len(A)) + A)
        W.append(inverse @ (b * k_ * G.exp()))
        U.append(inverse @ (b * v_))
        gates.append(summed)
    return States.apply(q, k, torch.cat(W), torch.cat(U), torch.cat(gates), h0, scale)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("t", [64, 130])
def test_gradients_of_the_whole_rule(channels, t):
    torch.manual_seed(t)
    unit = torch.nn.functional.normalize
    q, k, v = unit(torch.randn(t, 64), dim=-1), unit(torch.randn(t, 64), dim=-1), torch.randn(t, 64)
    leaves = [q, k, v, torch.rand(t), -torch.rand(t, 64) / 10 if channels else -torch.rand(t) / 10, torch.randn(64, 64)]
    do, dht = torch.randn(t, 64), torch.randn(64, 64)
    results = []
    for rule in (chunked, recurrence):
        own_leaves = [x.clone().requires_grad_() for x in leaves]
        outs = rule(*own_leaves, 0.125)
        results.append([*outs, *torch.autograd.grad(outs, own_leaves, (do, dht))])
    for name, a, b in zip(("o", "state", "q", "k", "v", "beta", "decay", "h0"), *results, strict=True):
        assert (a - b).norm() <= 2e-5 * b.norm(), name


# Invalid input.


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": lambda t: t[..., :32]}, "q: head dimension must be one of 64, 128, 256, got 32"),
        ({"do": lambda t: t[..., :48]}, "do: head dimension must be one of 64, 128, 256, got 48"),
        ({"q": lambda t: t[:, :-1]}, "k: expected shape"),
        ({"w": lambda t: t[:, :, :1]}, "w: expected shape"),
        ({"dv": lambda t: t[:, :-1]}, "dv: expected shape"),
        ({"k": lambda t: t.double()}, "k: dtype"),
        ({"k": lambda t: t.to("meta")}, "k: device"),
        ({"q": lambda t: t[0]}, "q: expected 4 dimensions"),
        ({"q": lambda t: None}, "q: expected a tensor"),
        ({name: (lambda t: t[:, :0]) for name in ("q", "k", "w", "do", "dv")}, "q: must not be empty"),
        ({"q": lambda t: t.repeat(1, 1, 3, 1)}, "q: number of heads must divide do's .*, got 3"),
        ({"g": lambda t: t[:, :-1]}, "g: expected shape"),
        ({"g": lambda t: t.bfloat16()}, "g: dtype"),
        ({"gk": lambda t: t[..., 0]}, "gk: expected 4 dimensions"),
        ({"dht": lambda t: t[:, :, :32]}, "dht: expected shape"),
        (
            {"cu_seqlens": lambda t: torch.tensor([0, 90, 80, 130])},
            "cu_seqlens: must not decrease, got 90, then 80 at index 2",
        ),
        ({"cu_seqlens": lambda t: torch.tensor([0, 129])}, "cu_seqlens: last entry must equal q's 130 rows, got 129"),
        ({"cu_seqlens": lambda t: torch.tensor([1, 130])}, "cu_seqlens: must begin with 0"),
        ({"cu_seqlens": lambda t: torch.tensor([0])}, "cu_seqlens: must have at least 2 entries, got 1"),
        ({"cu_seqlens": lambda t: torch.tensor([0.0, 130.0])}, "cu_seqlens: dtype"),
        ({"cu_seqlens": lambda t: torch.tensor([0, 130]), "num_chunks": lambda t: 0}, "num_chunks: must be at least 1"),
        ({"num_chunks": lambda t: 3}, "num_chunks: must be None without cu_seqlens, got 3"),
    ],
)
def test_invalid_input_is_rejected_by_name(change, message):
    rows, rest = problem(130)
    arguments = rows | rest
    for name, replace in change.items():
        arguments[name] = replace(arguments.get(name))
    with pytest.raises(InputError, match=message):
        chunk_gated_delta_rule_bwd_dhu(**arguments)


def test_packed_sequences_need_a_batch_of_one():
    rows, rest = problem(130, batch=2)
    with pytest.raises(InputError, match="q: batch must be 1 with cu_seqlens"):
        run(rows, rest | {"cu_seqlens": torch.tensor([0, 130])})


# flash-linear-attention.


def test_drop_in_accepts_old_and_new_fla_arguments():
    starts = [0, 70, 130]
    rows, rest = problem(130, starts=starts, v_first=True)
    h0, indices = torch.zeros_like(rest["dht"]), torch.zeros(3, 2)
    more = {"h0": h0, "dht": rest["dht"], "cu_seqlens": rest["cu_seqlens"], "chunk_indices": indices}
    new = fla.chunk_gated_delta_rule_bwd_dhu(**rows, **more, state_v_first=True, chunk_size=64, use_graph=False)
    old = fla.chunk_gated_delta_rule_bwd_dhu(**rows, **more, transpose_state_layout=True, use_exp2=False)
    assert_same(new, run(rows, rest | {"base2": True}), "new")
    assert_same(old, run(rows, rest), "old")
    positional = fla.chunk_gated_delta_rule_bwd_dhu(*rows.values(), h0, rest["dht"], None, True, rest["cu_seqlens"])
    assert_same(positional, new, "positional")
    assert fla.chunk_gated_delta_rule_bwd_dhu(**rows)[1] is None
    with pytest.raises(InputError, match="chunk_size: must be 64, got 32"):
        fla.chunk_gated_delta_rule_bwd_dhu(**rows, chunk_size=32)


def test_registered_with_flash_linear_attention():
    theirs = pytest.importorskip("fla.ops.common.chunk_delta_h")
    fla.register()
    rows, rest = problem(130, dtype=BF16)
    got = theirs.chunk_gated_delta_rule_bwd_dhu(**rows, h0=rest["dht"], dht=rest["dht"], scale=0.125)
    assert_same(got, run(rows, rest | {"base2": True, "scale": 0.125}), "registered")
    with pytest.raises(InputError, match="g: expected shape"):
        theirs.chunk_gated_delta_rule_bwd_dhu(**rows | {"g": rows["g"][:, 1:]}, scale=0.125)


def test_unsupported_problems_are_left_to_flash_linear_attention():
    q, do = torch.zeros(1, 1, 1, 64, dtype=BF16), torch.zeros(1, 1, 1, 128, dtype=BF16)
    assert fla._unsupported(q=q, do=do) is None
    assert "q: head dimension must be one of" in fla._unsupported(q=q[..., :32], do=do)
    assert "dtype" in fla._unsupported(q=q.float(), do=do)
    assert "chunk_size" in fla._unsupported(q=q, do=do, chunk_size=32)
    assert "device: must be of type" in fla._unsupported(q=q.to("meta"), do=do)


# On a GPU.


@gpu
@pytest.mark.parametrize("mode, starts", [("", None), ("g gk", [0, 1, 700, 1500])])
def test_error_is_not_above_that_of_flash_linear_attention(mode, starts):
    """Compare norms of the errors against the fp32 recurrence."""
    pytest.importorskip("fla")
    rows, rest = problem(1500, 4, 4, 128, 128, mode=mode, starts=starts)
    packed = {}
    if starts:
        from fla.ops.utils import prepare_chunk_indices, prepare_chunk_offsets

        packed = {
            "cu_seqlens": rest["cu_seqlens"],
            "chunk_indices": prepare_chunk_indices(rest["cu_seqlens"], CHUNK),
            "chunk_offsets": prepare_chunk_offsets(rest["cu_seqlens"], CHUNK),
        }
    from fla.ops.common import chunk_delta_h

    rest |= {"base2": True, "scale": 0.1}
    function = inspect.unwrap(chunk_delta_h.chunk_gated_delta_rule_bwd_dhu)  # skips registered replacements
    theirs = function(**rows, h0=rest["dht"], dht=rest["dht"], scale=0.1, **packed)
    ours = run(rows, rest)
    exact = [torch.empty_like(t, dtype=FP32) for t in ours]
    reference.bwd_dhu(
        *(rows[name] for name in ("q", "k", "w", "do", "dv")),
        rows.get("g"),
        rows.get("gk"),
        rest["dht"],
        0.1,
        rest.get("cu_seqlens"),
        False,
        True,
        *exact,
    )
    for name, ours_, theirs_, want in zip(("dh", "dh0", "dv2"), ours, theirs, exact, strict=True):
        off, theirs_off = ((t.float() - want).norm().item() for t in (ours_, theirs_))
        assert off <= 1.05 * theirs_off, f"{name}: off by {off:.3g}, theirs by {theirs_off:.3g}, of {want.norm():.3g}"
        assert theirs_off <= 8 * UNIT[BF16] * want.norm(), name


@gpu
@pytest.mark.skipif(not cuda.available(), reason="the CUDA kernels are not built")
@pytest.mark.parametrize(
    "dims, mode, dtype, v_first, dht",
    [
        ((64, 64), "", BF16, False, True),
        ((64, 64), "g gk", FP16, True, False),
        ((64, 128), "g", BF16, True, True),
        ((64, 256), "gk", FP16, False, True),
        ((128, 64), "gk", BF16, True, True),
        ((128, 128), "", BF16, False, False),
        ((128, 128), "g", BF16, True, True),
        ((128, 128), "g gk", FP16, False, True),
        ((128, 256), "g gk", BF16, True, True),
        ((128, 256), "g", FP16, False, False),
        ((256, 128), "gk", BF16, False, True),
        ((256, 256), "", FP16, True, True),
        ((256, 64), "g", BF16, False, True),
    ],
)
def test_schedules_and_backends_have_the_same_bits(dims, mode, dtype, v_first, dht, monkeypatch):
    from alignkit.ops.gated_delta_rule import cuda_backend as kernels

    bwd_dhu = kernels.bwd_dhu
    rows, rest = problem(
        655, 4, 2, *dims, dtype=dtype, mode=mode, starts=[0, 1, 1, 130, 463, 655], v_first=v_first, dht=dht
    )
    strong = {name: rows[name].cumsum(1) for name in mode.split()}  # so strong that factors underflow
    for gated in (rows, rows | strong):
        with dispatch.use("triton"):
            want = run(gated, rest)
        with dispatch.use("cuda"):
            for columns in (0, 32, 64, 128):
                monkeypatch.setattr(kernels, "bwd_dhu", lambda *a, columns=columns: bwd_dhu(*a, columns=columns))
                assert_same(run(gated, rest), want, f"{columns} columns")


def assert_heads_are_independent(rows, rest, heads):
    """Check that each head in `heads` gives the same bits among all heads as alone."""
    dh, dh0, dv2 = run(rows, rest)
    for head in heads:
        one = slice(head, head + 1)
        alone = run({name: t[:, :, one] for name, t in rows.items()}, rest | {"dht": rest["dht"][:, one]})
        assert_same((dh[:, :, one], dh0[:, one], dv2[:, :, one]), alone, f"head {head}")


@gpu
@pytest.mark.skipif(not cuda.available(), reason="the CUDA kernels are not built")
@pytest.mark.parametrize("columns", [32, 64, 128])
def test_more_states_than_fit_on_the_device(columns, monkeypatch):
    from alignkit.ops.gated_delta_rule import cuda_backend as kernels

    bwd_dhu = kernels.bwd_dhu
    rows, rest = problem(130, 40, 40, 128, 128, batch=4)
    monkeypatch.setattr(kernels, "bwd_dhu", lambda *a: bwd_dhu(*a, columns=columns))
    with dispatch.use("cuda"):
        assert_heads_are_independent(rows, rest, (0, 17, 39))


@gpu
@pytest.mark.skipif(not cuda.available(), reason="the CUDA kernels are not built")
@pytest.mark.parametrize(
    "dims, heads, starts",
    [
        ((128, 128), 24, None),
        ((128, 128), 32, None),
        ((64, 128), 33, None),
        ((128, 128), 34, None),
        ((128, 256), 12, None),
        ((64, 256), 15, None),
        ((128, 256), 16, None),
        ((128, 256), 17, None),
        ((128, 128), 8, [0, 130, 130, 131, 200]),
        ((128, 256), 4, [0, 1, 137, 190, 200]),
    ],
)
def test_clusters_share_a_state(dims, heads, starts, monkeypatch):
    """132 SMs hold about this many states in slices of 32, by clusters of 8, 4 or 2, or in several waves."""
    from alignkit.ops.gated_delta_rule import cuda_backend as kernels

    bwd_dhu = kernels.bwd_dhu
    for v_first in (False, True):
        rows, rest = problem(200, heads, heads, *dims, starts=starts, v_first=v_first)
        with dispatch.use("cuda"):
            monkeypatch.setattr(kernels, "bwd_dhu", lambda *a: bwd_dhu(*a, columns=64))
            want = run(rows, rest)
            for columns in (0, 32, 128):
                monkeypatch.setattr(kernels, "bwd_dhu", lambda *a, columns=columns: bwd_dhu(*a, columns=columns))
                assert_same(run(rows, rest), want, f"{columns} columns")


@gpu
def test_more_work_than_sms(backend):
    assert_heads_are_independent(*problem(100, 300, 300), (0, 131, 132, 299))


def many_sequences(sequences, heads, dims):
    """Return many short, empty and a few long sequences, and the results of each alone."""
    lengths = [(0, 64, 1 + 7 * i % 129, 65, 20)[i % 5] for i in range(sequences)]
    lengths[3], lengths[sequences // 2], lengths[-1] = 700, 1300, 400
    starts = [0, *itertools.accumulate(lengths)]
    rows, rest = problem(starts[-1], heads, heads, *dims, starts=starts)
    parts = []
    for i, (begin, end) in enumerate(pairwise(starts)):
        dht = rest["dht"][i : i + 1]
        if begin == end:
            parts.append((rows["q"].new_empty(1, 0, heads, *dims), dht, rows["dv"][:, :0]))
        else:
            parts.append(run({name: t[:, begin:end] for name, t in rows.items()}, {"dht": dht, "need_dh0": True}))
    dh, dh0, dv2 = zip(*parts, strict=True)
    rest["num_chunks"] = sum(len(t[0]) for t in dh)
    return rows, rest, (torch.cat(dh, 1), torch.cat(dh0), torch.cat(dv2, 1))


@gpu
@pytest.mark.skipif(not cuda.available(), reason="the CUDA kernels are not built")
@pytest.mark.parametrize(
    "dims, heads", [((64, 64), 16), ((64, 256), 8), ((128, 128), 12), ((128, 256), 8), ((256, 64), 8), ((256, 256), 4)]
)
@pytest.mark.parametrize("sequences", [90, 300])
def test_many_packed_sequences(sequences, dims, heads, monkeypatch):
    """The device processes only a fraction at once, so the assignment of sequences to CTAs varies between runs."""
    from alignkit.ops.gated_delta_rule import cuda_backend as kernels

    bwd_dhu = kernels.bwd_dhu
    with dispatch.use("cuda"):
        rows, rest, want = many_sequences(sequences, heads, dims)
        for columns in (32, 64, 128, 0):
            monkeypatch.setattr(kernels, "bwd_dhu", lambda *a, columns=columns: bwd_dhu(*a, columns=columns))
            for _ in range(5):
                assert_same(run(rows, rest), want, f"{columns} columns")
        streams, got = [torch.cuda.Stream() for _ in range(2)], []
        torch.cuda.synchronize()
        for stream in 3 * streams:
            with torch.cuda.stream(stream):
                got.append(run(rows, rest))
        torch.cuda.synchronize()
        for each in got:
            assert_same(each, want, "two streams at once")
        run(
            rows, rest | {"cu_seqlens": rest["cu_seqlens"][torch.randperm(sequences + 1)]}
        )  # invalid, but must terminate
        assert_same(run(rows, rest), want, "after invalid starts")


@gpu
@pytest.mark.skipif(not cuda.available(), reason="the CUDA kernels are not built")
@pytest.mark.parametrize("dims, heads", [((128, 128), 12), ((128, 256), 8)])
def test_many_packed_sequences_captured_in_a_graph(dims, heads):
    with dispatch.use("cuda"):
        rows, rest, want = many_sequences(90, heads, dims)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [run(rows, rest) for _ in range(2)]
        for i in range(20):
            for t in itertools.chain(*captured):
                t.fill_(float("nan"))
            graph.replay()
            for got in captured:
                assert_same(got, want, f"replay {i}")


@gpu
@pytest.mark.skipif(not cuda.available(), reason="the CUDA kernels are not built")
def test_many_streams_beside_a_graph():
    """Use more streams than the kernel has work counters."""
    with dispatch.use("cuda"):
        rows, rest, want = many_sequences(90, 4, (128, 128))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(rows, rest)
        streams, got = [torch.cuda.Stream(priority=-(i % 2)) for i in range(80)], []
        torch.cuda.synchronize()
        for stream in streams:
            graph.replay()
            with torch.cuda.stream(stream):
                got.append(run(rows, rest))
        torch.cuda.synchronize()
        for i, each in enumerate((captured, *got)):
            assert_same(each, want, f"stream {i - 1}")


@gpu
@pytest.mark.skipif(not cuda.available(), reason="the CUDA kernels are not built")
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("starts", [[0, 0, 64, 64, 194], [0, 1, 129, 449, 449, 513]])
def test_unaligned_states_have_the_same_bits(starts, v_first):
    """Addresses of dht and gates are not multiples of 32 bytes."""
    rows, rest = problem(starts[-1], 40, 40, 128, 128, starts=starts, v_first=v_first)

    def unaligned(t):
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    with dispatch.use("cuda"):
        got = run(rows | {name: unaligned(rows[name]) for name in ("g", "gk")}, rest | {"dht": unaligned(rest["dht"])})
        assert_same(got, run(rows, rest), "unaligned")


@gpu
def test_graph_capture_without_synchronization(backend):
    rows, rest = problem(200, starts=[0, 1, 130, 200])
    rest["num_chunks"] = 6
    want = run(rows, rest)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run(rows, rest)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(again, want, "again")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(rows, rest)
    rows["do"].neg_()
    rows["dv"].neg_()
    rest["dht"].neg_()
    graph.replay()
    assert_same([-t for t in out], want, "replayed")


@gpu
def test_wrong_cu_seqlens_access_no_other_memory(backend):
    """compute-sanitizer checks the accesses."""
    for starts in ([-5, 300], [150, 20, 500], [0, 2**31 - 1], [2**31 - 1, 0]):
        rows, rest = problem(200, starts=[0, 200] if len(starts) == 2 else [0, 100, 200])
        rest |= {"cu_seqlens": torch.tensor(starts), "num_chunks": 2}
        assert run(rows, rest)[0].shape[1] == 2
    torch.cuda.synchronize()
