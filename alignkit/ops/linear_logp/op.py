"""The record of linear_logp and the other ops of the LM head: kernels, golden cases, self-test (../record.py)."""

from __future__ import annotations

import torch

from ...runtime.dispatch import Kernel, one_per_backend
from ...runtime.families import CUDA
from ...runtime.operands import Operand
from ..inputs import Inputs, Normal
from ..record import ROWS, VOCAB, WIDTH, Check, Golden, Op, Rows, Trial
from ..self_test import difference
from ..words import Words, dense
from . import cpu, head_logits, linear_logp, log_softmax, logp_from_logits, reference, token_logp
from .problem import Head, HeadGradient, HeadProducts


def _triton():
    from . import triton_backend

    return triton_backend


def _cuda():
    from . import cuda_backend

    return cuda_backend


def _head(given: Words) -> tuple[int, int, torch.dtype, Operand, Operand]:
    n, ids, k = (given.size(name) for name in ("rows", "ids", "k"))
    dtype = given.dtype("dtype")
    return n, ids, dtype, dense(dtype, n, k, aligned=given.flag("aligned", "yes")), dense(dtype, ids, k)


def _padded(dtype: torch.dtype, rows: int, columns: int, to: int) -> Operand:
    return torch.Size((rows, columns)), (columns + -columns % to, 1), dtype, True


def _statistics(backend: str, given: Words) -> Head:
    n, ids, _, hidden, weight = _head(given)
    return Head(backend, hidden, weight, _padded(torch.float32, n, ids, 4) if given.flag("keep_logits") else None)


def _gradient(backend: str, given: Words) -> HeadGradient:
    n, ids, dtype, hidden, weight = _head(given)
    return HeadGradient(backend, hidden, weight, _padded(dtype, n, ids, 8))


def _products(backend: str, given: Words) -> HeadProducts:
    n, ids, dtype, hidden, weight = _head(given)
    results = dense(torch.float32, *hidden[0]), dense(dtype, *weight[0])
    return HeadProducts(backend, _padded(dtype, n, ids, 8), hidden, weight, *results)


def head(given: Inputs) -> list[torch.Tensor]:
    h, w, b = given.values(150, 64, seed=1), given.values(700, 64, seed=2), given.values(700, seed=3)
    target = given.integers(150, seed=4, below=690)
    target[::7] = -100
    kwargs = {"temperature": 0.7, "vocab_size": 690, "return_entropy": True}
    logits = head_logits(h, w, b, soft_cap=8.0)
    logp = given.run(
        lambda h, w, b: linear_logp(h, w, target, bias=b, soft_cap=8.0, logit_scale=0.5, **kwargs), h, w, b
    )
    return (
        logp
        + given.run(lambda z: logp_from_logits(z, target, **kwargs), logits.to(given.dtype))
        + [logits, log_softmax(logits, temperature=0.7)]
    )


def rounding_head(given: Inputs) -> list[torch.Tensor]:
    """Compute the head where chains, gradients and logits round; some rows have distant logits."""
    h, w, b = given.rough(60, 64, seed=1, low=-4), given.rough(300, 64, seed=2, low=-4), given.rough(300, seed=3)
    h[:20] = given.rough(20, 64, seed=4, high=3)
    target = given.integers(60, seed=5, below=290)
    target[::7] = -100
    kwargs = {"temperature": 0.7, "vocab_size": 290, "return_entropy": True}
    logits = head_logits(h, w, b)
    capped = given.run(
        lambda h, w, b: linear_logp(h, w, target, bias=b, soft_cap=8.0, logit_scale=0.3, **kwargs),
        *(h, w, b),
        rough=True,
    )
    plain = given.run(lambda h, w: linear_logp(h, w, target, vocab_size=290), h, w, rough=True)
    of_logits = given.run(lambda z: logp_from_logits(z, target, **kwargs), logits.to(given.dtype), rough=True)
    return [*capped, *plain, *of_logits, logits, log_softmax(logits, temperature=0.7)]


def large_head(given: Inputs) -> list[torch.Tensor]:
    """Compute a head with more rows and ids than one gradient chain covers on any device family."""
    h, w = given.values(8300, 16, seed=1, scale=2.0**-5), given.values(4300, 16, seed=2)
    target = given.integers(8300, seed=4, below=4300)
    return given.run(lambda h, w: linear_logp(h, w, target), h, w)


def _logp_of_logits(normal: Normal) -> str | None:
    hidden, head, target = normal(13, ROWS, WIDTH), normal(14, VOCAB, WIDTH), normal.integers(12, ROWS, below=VOCAB)
    want = linear_logp(hidden, head, target, temperature=0.7)
    logits = head_logits(hidden, head)
    got = {
        "log_softmax": log_softmax(logits, temperature=0.7).gather(1, target[:, None])[:, 0],
        "token_logp": token_logp(logits, target[:, None], temperature=0.7)[:, 0],
        "logp_from_logits": logp_from_logits(logits, target, temperature=0.7),
    }
    problems = (difference(name, (logp,), (want,)) for name, logp in got.items())
    return next(filter(None, problems), None)


def _samples():
    from .samples import SAMPLES

    return SAMPLES


def _trial(given: Inputs, p: Head | HeadGradient | HeadProducts | None) -> list[torch.Tensor]:
    rows, width, ids = (9, 16, 200) if p is None else (*p.hidden[0], p.weight[0][0])
    hidden, weight = given.rough(rows, width, seed=1, low=-4), given.rough(ids, width, seed=2, low=-4)
    target = given.integers(rows, seed=3, below=ids)
    options = {"temperature": 0.7, "keep_logits": isinstance(p, Head) and p.products is not None}
    return given.run(lambda h, w: linear_logp(h, w, target, return_entropy=True, **options), hidden, weight, rough=True)


def _self_test(normal):
    head, x, target = normal(5, VOCAB, WIDTH), normal(0, ROWS, WIDTH), normal.integers(6, ROWS, below=VOCAB)
    yield Rows("linear_logp", lambda x, t: linear_logp(x, head, t, temperature=0.7, return_entropy=True), [x, target])
    yield Check(
        "linear_logp",
        "equal to log_softmax, token_logp and logp_from_logits of head_logits",
        lambda: _logp_of_logits(normal),
    )


_EACH = one_per_backend(_triton, cpu, reference)
_SMALL = {"": ("rows=9 ids=200 k=16", "rows=9 ids=200 k=16 dtype=fp32")}
"""Problems of the trials on a CPU."""
OP = Op(
    "linear_logp",
    kernels={
        "linear_logp": _EACH,
        "head_statistics": (Kernel("cuda", CUDA, _cuda, rule=lambda p: _cuda().head_statistics_rejects(p)), *_EACH),
        "head_gradient": (Kernel("cuda", CUDA, _cuda, rule=lambda p: _cuda().head_gradient_rejects(p)), *_EACH),
        "head_products": (Kernel("cuda", CUDA, _cuda, rule=lambda p: _cuda().head_products_rejects(p)), *_EACH),
    },
    described={"head_statistics": _statistics, "head_gradient": _gradient, "head_products": _products},
    golden=(Golden(head), Golden(rounding_head), Golden(large_head, slow=True)),
    self_test=_self_test,
    samples=_samples,
    trials={
        "linear_logp": Trial(_trial),
        "head_statistics": Trial(
            _trial, _SMALL | {"cuda": ("rows=260 ids=300 k=64", "rows=260 ids=300 k=64 keep_logits=yes")}
        ),
        "head_gradient": Trial(_trial, _SMALL | {"cuda": ("rows=260 ids=300 k=64", "rows=3000 ids=4000 k=64")}),
        "head_products": Trial(_trial, _SMALL | {"cuda": ("rows=260 ids=300 k=64",)}),
    },
)
