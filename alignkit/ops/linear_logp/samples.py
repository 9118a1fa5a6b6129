"""Random valid calls of linear_logp (../samples.py)."""

from __future__ import annotations

import torch

from ..samples import INTS, Fault, Sample, Scalar, Source, Tensor, poked
from . import head_logits, linear_logp, log_softmax, logp_from_logits, token_logp


def _temperature(s: Source, rows) -> Tensor | Scalar:
    """Return a temperature: 1, another number, a 0-dim tensor, or one value per row."""
    kind = s.rng.choice(("one", "one", "number", "number", "0-dim", "rows"))
    if kind == "one":
        return Scalar(1.0, "positive finite")
    if kind == "number":
        return Scalar(10 ** s.rng.uniform(-1, 1), "positive finite")
    t = torch.rand(() if kind == "0-dim" else tuple(rows), generator=s.generator, device="cpu") + 0.3
    return Tensor(t, tuple(range(len(rows))), (torch.float32,), "temperature", rows=kind == "rows", finite=True)


def _target(s: Source, rows, vocab: int, ignore: int) -> torch.Tensor:
    t = s.ints(rows, 0, vocab)
    return torch.where(s.some(tuple(rows), 0.2), ignore, t)


def _value_faults(s: Source, given, vocab: int) -> list[Fault]:
    faults = []
    if "target" in given and given["target"].value.numel():
        ignore = given["ignore_index"].value
        for value in (vocab, vocab + s.size(1000), -1 if ignore != -1 else -2, 2**62, -(2**63)):
            value += value == ignore  # ignore_index itself is valid
            faults.append((f"target {value}", poked("target", value, s), ("target",)))
    t = given["temperature"]
    if isinstance(t, Tensor) and t.value.numel():
        for value in (0.0, -1.0, float("nan"), float("inf")):
            faults.append((f"temperature {value} in a tensor", poked("temperature", value, s), ("temperature",)))
    return faults


def _given_rows(s: Source, rows, vocab: int) -> dict:
    """Return the per-row and vocabulary arguments of linear_logp and logp_from_logits."""
    ignore = s.rng.choice((-100, -100, -1, vocab + 5, s.rng.randrange(vocab)))
    size = s.rng.choice((None, vocab, s.rng.randint(1, vocab)))
    target = _target(s, rows, size or vocab, ignore)
    return {
        "target": Tensor(target, tuple(range(len(rows))), (torch.int64,), "target", rows=True),
        "temperature": _temperature(s, rows),
        "ignore_index": Scalar(ignore, "int"),
        "vocab_size": Scalar(size, "positive int", optional=True, bad=(vocab + 1, 6.5)),
        "vocab_start": Scalar(0, "int", bad=(1, -1, 128)),
        "tp": s.group(),
        "return_entropy": Scalar(s.chance(0.5), "flag"),
    }


def _vocab(s: Source) -> int:
    return s.rng.choice((s.size(40), s.size(130), 128, 129, s.size(300)))


def _linear_logp(s: Source) -> Sample:
    dtype, lead, d, vocab = s.dtype(), s.lead(), s.size(16), _vocab(s)
    per_row = _given_rows(s, lead, vocab)
    main_grad = s.floats(vocab, d, finite=True) if s.chance(0.25) else None
    given = {
        "hidden": Tensor(s.floats(*lead, d, dtype=dtype, finite=True), (len(lead),), rows=True, leaf=True, finite=True),
        "weight": Tensor(s.floats(vocab, d, dtype=dtype), (1,), ndim=True, leaf=True),
        "bias": Tensor(
            s.floats(vocab, dtype=dtype) if s.chance(0.4) else None, (0,), ndim=True, optional=True, leaf=True
        ),
        "soft_cap": Scalar(s.rng.choice((None, None, s.rng.uniform(1, 50))), "positive", optional=True),
        "logit_scale": Scalar(s.rng.choice((1.0, 1.0, s.rng.uniform(-2, 2))), "finite"),
        "keep_logits": Scalar(s.chance(0.3), "flag"),
        "main_grad": Tensor(main_grad, (0, 1), (torch.float32,), "main_grad", ndim=True, optional=True, written=True),
        "workspace": Scalar(s.rng.choice((None, None, s.rng.randint(1, 10**5))), "positive int", optional=True),
        **per_row,
    }
    limit = per_row["vocab_size"].value or vocab
    faults = _value_faults(s, given, limit)
    if given["hidden"].value.numel():
        for value in (float("nan"), float("inf")):
            faults.append((f"hidden {value}", poked("hidden", value, s), ("hidden",)))
    if main_grad is not None:
        faults.append(("main_grad is weight", lambda a: a.update(main_grad=a["weight"].detach()), ("main_grad",)))
        if main_grad.numel() > 1:
            faults.append(
                (
                    "main_grad overlaps itself",
                    lambda a: a.update(main_grad=torch.zeros(1, 1).expand(vocab, d)),
                    ("main_grad",),
                )
            )
        if min(main_grad.shape) > 1:  # otherwise the transposed tensor is contiguous too
            faults.append(
                ("main_grad is transposed", lambda a: a.update(main_grad=torch.zeros(d, vocab).t()), ("main_grad",))
            )
    return Sample("linear_logp", linear_logp, given, faults)


def _logp_from_logits(s: Source) -> Sample:
    dtype, lead, vocab = s.dtype(), s.lead(), _vocab(s)
    per_row = _given_rows(s, lead, vocab)
    given = {
        "logits": Tensor(s.floats(*lead, vocab, dtype=dtype), tuple(range(len(lead))), rows=True, leaf=True),
        **per_row,
    }
    return Sample(
        "logp_from_logits", logp_from_logits, given, _value_faults(s, given, per_row["vocab_size"].value or vocab)
    )


def _head_logits(s: Source) -> Sample:
    dtype, lead, d, vocab = s.dtype(), s.lead(), s.size(24), _vocab(s)
    given = {
        "hidden": Tensor(s.floats(*lead, d, dtype=dtype), (len(lead),), rows=True),
        "weight": Tensor(s.floats(vocab, d, dtype=dtype), (1,), ndim=True),
        "bias": Tensor(s.floats(vocab, dtype=dtype) if s.chance(0.4) else None, (0,), ndim=True, optional=True),
        "soft_cap": Scalar(s.rng.choice((None, None, s.rng.uniform(1, 50))), "positive", optional=True),
        "logit_scale": Scalar(s.rng.choice((1.0, 1.0, s.rng.uniform(-2, 2))), "finite"),
    }
    return Sample("head_logits", head_logits, given)


def _log_softmax(s: Source) -> Sample:
    lead, vocab = s.lead(), _vocab(s)
    given = {
        "logits": Tensor(s.floats(*lead, vocab, dtype=s.dtype()), rows=True),
        "temperature": _temperature(s, lead),
        "vocab_size": Scalar(
            s.rng.choice((None, s.rng.randint(1, vocab))), "positive int", optional=True, bad=(vocab + 1, 6.5)
        ),
    }
    if isinstance(given["temperature"], Tensor) and given["temperature"].value.ndim:
        given["logits"].bound = tuple(range(len(lead)))
    return Sample("log_softmax", log_softmax, given, _value_faults(s, given, vocab))


def _token_logp(s: Source) -> Sample:
    lead, vocab = s.lead(), _vocab(s)
    ids = s.ints([*lead, s.size(6, 0)], 0, vocab, s.dtype(INTS))
    given = {
        "logits": Tensor(s.floats(*lead, vocab, dtype=s.dtype()), tuple(range(len(lead))), rows=True),
        "token_ids": Tensor(ids, tuple(range(len(lead))), INTS, "ids", ndim=True, rows=True),
        "temperature": _temperature(s, lead),
    }
    faults = _value_faults(s, given, vocab)
    if ids.numel():
        for value in (-1, vocab, 2**31 - 1):
            faults.append((f"id {value}", poked("token_ids", value, s), ("token_ids",)))
    return Sample("token_logp", token_logp, given, faults)


SAMPLES = {_linear_logp: 14, _logp_from_logits: 9, _head_logits: 5, _log_softmax: 5, _token_logp: 6}
"""Weight of each generator."""
