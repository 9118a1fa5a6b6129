"""Random valid calls of moe_experts (../samples.py)."""

from __future__ import annotations

import contextlib
import math

import torch

from ..samples import INTS, Fault, Sample, Scalar, Source, Tensor, poked, replaced
from . import moe_experts


def _moe_experts(s: Source) -> Sample:
    """Use one rank, and the experts' matrices stacked or as a sequence."""
    dtype, lead, experts, h = s.dtype(), s.lead(), s.size(7), s.size(20)
    f = s.rng.choice((s.size(20), 16 * s.size(3)))
    k = s.rng.randint(1, experts)
    tokens = math.prod(lead)
    ids = [[e if s.chance(0.9) else -1 for e in s.rng.sample(range(experts), k)] for _ in range(tokens)]
    listed = s.chance(0.4)

    def call(gate_up, down, **others):
        if listed:
            gate_up, down = _unstacked(gate_up), _unstacked(down)
        return moe_experts(gate_up=gate_up, down=down, **others)

    whole = tuple(range(len(lead) + 1))
    given = {
        "x": Tensor(s.floats(*lead, h, dtype=dtype), whole, rows=True, leaf=True),
        "ids": Tensor(torch.tensor(ids, dtype=s.dtype(INTS)).view(*lead, k), whole, INTS, "ids", rows=True),
        "weights": Tensor(s.floats(*lead, k), whole, (torch.float32,), "weights", rows=True, leaf=True),
        "gate_up": Tensor(s.floats(experts, 2 * f, h, dtype=dtype), (0, 1, 2), ndim=True, leaf=True),
        "down": Tensor(s.floats(experts, h, f, dtype=dtype), (0, 1, 2), ndim=True, leaf=True),
        "num_experts": Scalar(s.rng.choice((None, experts)), "positive int", optional=True, bad=(experts + 1,)),
        "first_expert": Scalar(0, "int", bad=(1, -1, experts)),
        "tp": s.group(),
        "ep": s.group(),
        "gather": Scalar(s.chance(0.3), "flag"),
    }
    return Sample("moe_experts", call, given, _choice_faults(s, given))


def _unstacked(matrices):
    """Return stacked matrices as a list of tensors where possible."""
    if type(matrices) is torch.Tensor and matrices.layout == torch.strided and matrices.ndim == 3 and len(matrices):
        with contextlib.suppress(RuntimeError):  # torch makes no views of tensors without memory
            return [matrices[i] for i in range(len(matrices))]  # the gradient of `unbind` depends on autocast
    return matrices


def _choice_faults(s: Source, given) -> list[Fault]:
    experts, ids = len(given["gate_up"].value), given["ids"].value
    faults = [
        ("no features", lambda a: a.update(gate_up=a["gate_up"][:, :0], down=a["down"][..., :0]), ("gate_up", "down")),
        ("no experts", lambda a: a.update(gate_up=a["gate_up"][:0], down=a["down"][:0]), ("gate_up", "down")),
        ("odd rows", replaced("gate_up", lambda w: w[:, :-1]), ("gate_up", "down")),
    ]
    if ids.numel():
        faults += [(f"expert {e}", poked("ids", e, s), ("ids",)) for e in (experts, -2, 2**31 - 1)]
        if ids.shape[-1] > 1:
            faults.append(("an expert twice", replaced("ids", lambda t: torch.zeros_like(t)), ("ids",)))
    return faults


SAMPLES = {_moe_experts: 10}
"""Weight of each generator."""
