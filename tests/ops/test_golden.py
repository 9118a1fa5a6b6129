"""The bits of the engines' ops, forward and backward, as they were when the contract's id was last changed.

After a change of the contract, and of its id: ``python -m tests.ops.test_golden --write`` on the CPU, and with
ALIGNKIT_TEST_DEVICE=cuda on a GPU of the family.
"""
import hashlib
import json
import os
import pathlib
import sys

import numpy as np
import pytest
import torch

from alignkit import backends, contract_id, ops
from alignkit.ops._common import DTYPES

DEVICE = torch.device(os.environ.get("ALIGNKIT_TEST_DEVICE", "cpu"))
COMMAND = "python -m tests.ops.test_golden --write"


def path(family: str) -> pathlib.Path:
    return pathlib.Path(__file__).with_name(f"golden_{family}.json")


def integers(*shape: int, seed: int, below: int) -> torch.Tensor:
    """int64 in [0, below), the same on every machine and with every version of torch."""
    v = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        v = (v ^ (v >> np.uint64(shift))) * np.uint64(factor)
    return torch.from_numpy(((v >> np.uint64(32)) % np.uint64(below)).astype(np.int64)).reshape(shape).to(DEVICE)


def values(*shape: int, dtype: torch.dtype, seed: int, scale: float = 2.0**-6) -> torch.Tensor:
    """Multiples of `scale` in [-100, 100] times it: exact in bf16 for a power of two."""
    return ((integers(*shape, seed=seed, below=201) - 100).double() * scale).to(dtype)


def run(function, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """Outputs of `function` and the gradients of its leaves, for fixed gradients of the outputs."""
    leaves = tuple(t.clone().requires_grad_() for t in leaves)
    out = function(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(out, [values(*o.shape, dtype=o.dtype, seed=90 + i) for i, o in enumerate(out)])
    return [*(o.detach() for o in out), *(t.grad for t in leaves)]


def linears(dtype):
    x, w = values(70, 384, dtype=dtype, seed=1), values(200, 384, dtype=dtype, seed=2)
    b = values(200, dtype=dtype, seed=3)
    return run(ops.linear, x, w, b) + run(ops.row_parallel_linear, x, w, b)


def norms(dtype):
    x, r = values(70, 200, dtype=dtype, seed=1), values(70, 200, dtype=dtype, seed=3)
    w = values(200, dtype=dtype, seed=2)
    return run(lambda x, w: ops.rms_norm(x, w, 1e-6), x, w) + run(lambda *t: ops.rms_norm(*t[:2], 1e-6, t[2]), x, w, r)


def elementwise(dtype):
    x, gate = values(70, 3, 64, dtype=dtype, seed=1), values(70, 300, dtype=dtype, seed=2, scale=2.0**-3)
    positions = integers(70, seed=3, below=500)
    return (run(lambda x: ops.rope(x, positions, ops.rope_table(64, 500, 1e6, x.device)), x)
            + run(lambda g: ops.silu_mul(g[:, :150], g[:, 150:]), gate))


def attention(dtype):
    lens = (1, 31, 64, 150)
    starts = torch.tensor([0, *np.cumsum(lens).tolist()], device=DEVICE)
    q, k, v = (values(sum(lens), h, 64, dtype=dtype, seed=h + i) for i, h in enumerate((4, 2, 2)))
    cache = values(20, 16, 2, 64, dtype=dtype, seed=5), values(20, 16, 2, 64, dtype=dtype, seed=6)
    paged = ops.paged_attention(q[:7], *cache, integers(2, 9, seed=7, below=20).int(),
                                torch.tensor([0, 3, 7], device=DEVICE).int(),
                                torch.tensor([130, 77], device=DEVICE).int())
    return [*run(lambda q, k, v: ops.attention(q, k, v, starts), q, k, v), paged]


def head(dtype):
    h, w = values(150, 64, dtype=dtype, seed=1), values(700, 64, dtype=dtype, seed=2)
    b = values(700, dtype=dtype, seed=3)
    target = integers(150, seed=4, below=690)
    target[::7] = -100
    kwargs = {"temperature": 0.7, "vocab_size": 690, "return_entropy": True}
    logits = ops.head_logits(h, w, b, soft_cap=8.0)
    return (run(lambda h, w, b: ops.linear_logp(h, w, target, bias=b, soft_cap=8.0, logit_scale=0.5, **kwargs), h, w, b)
            + run(lambda z: ops.logp_from_logits(z, target, **kwargs), logits.to(dtype))
            + [logits, ops.log_softmax(logits, temperature=0.7)])


def large_head(dtype):
    """More rows and ids than one chain of the gradients takes on any device family."""
    h, w = values(8300, 16, dtype=dtype, seed=1, scale=2.0**-5), values(4300, 16, dtype=dtype, seed=2)
    target = integers(8300, seed=4, below=4300)
    return run(lambda h, w: ops.linear_logp(h, w, target), h, w)


CASES = {f"{f.__name__} {str(d)[6:]}": (f, d) for f in (linears, norms, elementwise, attention, head, large_head)
         for d in DTYPES}


def sha256(tensors: list[torch.Tensor]) -> list[str]:
    return [hashlib.sha256(t.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for t in tensors]


@pytest.fixture(scope="module")
def golden() -> dict:
    family = backends.family(DEVICE)
    assert path(family).exists(), f"{path(family).name} is missing: write it with {COMMAND}"
    kept = json.loads(path(family).read_text())
    assert kept["contract"] == contract_id(family), (
        f"{path(family).name} holds the bits of {kept['contract']}, but this is {contract_id(family)}: write it with "
        f"{COMMAND}")
    return kept["sha256"]


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_contract(golden, case):
    function, dtype = CASES[case]
    assert sha256(function(dtype)) == golden[case]


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], f"usage: {COMMAND}"
    seen = {name: sha256(function(dtype)) for name, (function, dtype) in CASES.items()}
    path(backends.family(DEVICE)).write_text(json.dumps(
        {"contract": contract_id(backends.family(DEVICE)), "sha256": seen}, indent=1) + "\n")
