"""Floating-point modes of the caller or of torch's threads change no bit of any op.

`everything` calls each op, and a subprocess imports it by name. A new op needs a call there.
"""

import contextlib
import ctypes
import subprocess
import sys

import pytest
import torch

from alignkit import ops
from alignkit.ops.gated_delta_rule import chunk_gated_delta_rule_bwd_dhu
from alignkit.ops.rope import _table
from alignkit.runtime import dispatch
from alignkit.testing import assert_bitwise_equal

from .helpers import CPU

MODES = {"flush": None, "up": 0x800, "down": 0x400, "zero": 0xC00}
"""Flush denormals (None), or a rounding mode of x86-64's <fenv.h>."""


@contextlib.contextmanager
def in_mode(mode):
    libm = ctypes.CDLL(None)
    flushed = mode == "flush"
    assert torch.set_flush_denormal(True) if flushed else libm.fesetround(MODES[mode]) == 0
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        libm.fesetround(0)


def inputs(rows, dtype):
    """Return the inputs; with 400 rows, torch uses several threads.

    Some values are so small that sums and products are denormal.
    """
    torch.manual_seed(3)

    def randn(*shape, dtype=dtype):
        t = torch.randn(shape)
        t[..., ::3] *= 2.0**-70
        t[::5] *= 2.0**-60
        return t.to(dtype)

    return {
        "x": randn(rows, 96),
        "r": randn(rows, 96),
        "w": randn(96, 96),
        "b": randn(96),
        "n": randn(96),
        "q": randn(rows, 2, 24),
        "k": randn(rows, 1, 24),
        "head": randn(300, 96),
        "hb": randn(300),
        "target": torch.randint(0, 300, (rows,)),
        "positions": torch.randint(0, 60, (rows,)),
        "grad": randn(rows, 96, dtype=torch.float32),
        "state": randn(1, 1, 64, 64, dtype=torch.float32),
        "rule": randn(1, 96, 1, 64),
        "gate": -torch.rand(1, 96, 1),
    }


def run(function, grad, *leaves):
    leaves = [t.clone().requires_grad_() for t in leaves]
    out = function(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(out, [grad.flatten()[: o.numel()].reshape(o.shape).to(o.dtype) for o in out])
    return [*(o.detach() for o in out), *(t.grad for t in leaves)]


def everything(given):
    x, r, w, b, n, q, k, head, hb, target, positions, grad, state, rule, gate = given.values()
    _table.cache_clear()
    cu = torch.tensor([0, len(x) // 3, len(x)])
    kwargs = {"temperature": 0.7, "return_entropy": True}
    table = ops.rope_table(24, 60, 1e4)
    logits = ops.head_logits(x, head, hb, soft_cap=3.3, logit_scale=0.37)
    main_grad = torch.zeros(300, 96)
    expert_logits = ops.linear(x, head[:12], out_dtype=torch.float32)
    weights, ids = ops.moe_router(expert_logits, 4)
    experts = head[:288].view(12, 24, 96), head[:288].view(12, 96, 24)[..., :12]
    found = {
        "linear": run(ops.linear, grad, x, w, b),
        "row_parallel_linear": run(ops.row_parallel_linear, grad, x, w, b),
        "linear fp16": run(ops.linear, grad, *(t.half() for t in (x, w, b))),
        "rms_norm": run(lambda *t: ops.rms_norm(*t[:2], 1e-6, t[2], zero_centered=True), grad, x, n, r),
        "rms_norm, small": run(lambda x, n: ops.rms_norm(x, n, 1e-37), grad, x, n),
        "silu_mul": run(ops.silu_mul, grad, x, r),
        "sigmoid_mul": run(lambda x: ops.sigmoid_mul(grad[:, :1], x), grad, x),
        "moe_router": run(lambda z: ops.moe_router(z, 4, normalize=False, scale=0.37)[0], grad, expert_logits),
        "moe_router, sigmoid": run(
            lambda z: ops.moe_router(z, 4, score="sigmoid", groups=3, top_groups=2)[0], grad, expert_logits
        ),
        "moe_experts": run(lambda x, w, g, d: ops.moe_experts(x, ids, w, g, d), grad, x, weights, *experts),
        "qk_norm_rope": list(ops.qk_norm_rope(q, q, n[:24], n[24:48], 1e-6, positions, table)),
        "rope": [table, *run(lambda q: ops.rope(q, positions, table), grad, q)],
        "attention": run(lambda q, k, v: ops.attention(q, k, v, cu), grad, q, k, k),
        "attention, scaled": run(lambda q, k, v: ops.attention(q, k, v, cu, 0.3), grad, q, k, k),
        "linear_logp": run(
            lambda h, w, b: ops.linear_logp(h, w, target, bias=b, soft_cap=3.3, logit_scale=0.37, **kwargs),
            grad,
            x,
            head,
            hb,
        ),
        "linear_logp, small blocks": run(lambda h, w: ops.linear_logp(h, w, target, workspace=40000), grad, x, head),
        "main_grad": [
            *run(lambda h: ops.linear_logp(h, head.clone().requires_grad_(), target, main_grad=main_grad), grad, x),
            main_grad,
        ],
        "logp_from_logits": run(lambda z: ops.logp_from_logits(z, target, **kwargs), grad, logits.to(x.dtype)),
        "head_logits": [logits],
        "log_softmax": [ops.log_softmax(logits, temperature=0.7)],
        "token_logp": [ops.token_logp(logits, target[:, None], temperature=0.7)],
        "paged_attention": [
            ops.paged_attention(
                q,
                k[None],
                k[None],
                torch.zeros(1, 1, dtype=torch.int32),
                torch.tensor([0, len(x)]),
                torch.tensor([len(x)]),
            )
        ],
        "gated_delta_rule": list(
            chunk_gated_delta_rule_bwd_dhu(*[rule] * 5, gate, dht=state, scale=0.3, need_dh0=True)
        ),
    }
    return found


def sums():
    """Return results that differ between all modes: three sums and whether denormals are kept."""
    one, eps = 1.0, sys.float_info.epsilon
    return one + eps / 2, -one - eps / 2, one + eps * 0.75, sys.float_info.min * 0.5 > 0.0


def assert_same(got, want, what):
    for name, tensors in want.items():
        for i, (a, b) in enumerate(zip(got[name], tensors, strict=True)):
            assert_bitwise_equal(a, b, f"{what}: {name}, tensor {i}")


@pytest.mark.skipif(not CPU, reason="the modes of a CPU")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_mode_of_the_caller_changes_no_bit(backend, dtype, mode):
    given = inputs(12 if backend == "reference" else 400, dtype)
    with dispatch.use(backend):
        want, of_default = everything(given), sums()
        with in_mode(mode):
            of_caller = sums()
            assert of_caller != of_default
            assert_same(everything(given), want, mode)
            assert sums() == of_caller  # the caller's mode is restored


@pytest.mark.skipif(not CPU, reason="the modes of a CPU")
@pytest.mark.parametrize("mode", ["flush", "up"])
def test_mode_of_torchs_threads_changes_no_bit(mode):
    """New torch threads inherit the mode of their creator and keep it."""
    code = f"""
import torch
from tests.ops.test_modes import assert_same, everything, in_mode, inputs
torch.set_num_threads(1)
given = {{dtype: inputs(400, dtype) for dtype in (torch.float32, torch.bfloat16)}}
want = {{dtype: everything(given[dtype]) for dtype in given}}
probe, least = torch.full((300000,), 1 + 2500 * 2.0**-23), torch.full((300000,), 2.0**-140)
torch.set_num_threads(3)
with in_mode({mode!r}):
    probe.clone()
products = probe * probe, -probe * probe, (least * 1).view(torch.int32)
assert any(len(t.unique()) > 1 for t in products), "torch's threads have the default mode, so the test proves nothing"
for dtype in given:
    assert_same(everything(given[dtype]), want[dtype], {mode!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not CPU, reason="the autocast of a CPU")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_matmul_precision_of_torch_changes_no_bit(backend):
    given = inputs(12, torch.float32)
    with dispatch.use(backend):
        want = everything(given)
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(everything(given), want, "autocast")
        torch.set_float32_matmul_precision("medium")
        try:
            assert_same(everything(given), want, "products in bf16")
        finally:
            torch.set_float32_matmul_precision("highest")
