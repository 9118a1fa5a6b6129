"""Random valid calls of moe_router (../samples.py)."""

from __future__ import annotations

import torch

from ..samples import Sample, Scalar, Source, Tensor, poked, replaced
from . import moe_router


def _moe_router(s: Source) -> Sample:
    lead, sigmoid = s.lead(), s.chance(0.5)
    groups = s.size(4) if sigmoid else 1
    top_groups = s.rng.randint(1, groups)
    n = groups * s.size(8)
    most = n // groups * top_groups
    given = {
        "logits": Tensor(s.floats(*lead, n), (), (torch.float32,), "logits", rows=True, leaf=True),
        "top_k": Scalar(s.rng.randint(1, most), "positive int", bad=(most + 1,)),
        "score": Scalar("sigmoid" if sigmoid else "softmax", "score"),
        "normalize": Scalar(s.chance(0.6), "flag"),
        "bias": Tensor(
            s.floats(n, finite=True) if sigmoid and s.chance(0.6) else None,
            (0,),
            (torch.float32,),
            "bias",
            ndim=True,
            optional=True,
            finite=True,
        ),
        "groups": Scalar(groups, "positive int", bad=(n + 1, 2 * n)),
        "top_groups": Scalar(top_groups, "positive int", bad=(groups + 1,)),
        "scale": Scalar(s.rng.choice((1.0, s.rng.uniform(0.1, 5))), "positive finite"),
    }
    faults = []
    if given["bias"].value is not None:
        given["logits"].bound = (len(lead),)
        for value in (float("nan"), float("inf")):
            faults.append((f"bias with {value}", poked("bias", value, s), ("bias",)))
        faults.append(("bias of the choice by softmax", replaced("score", lambda _: "softmax"), ("bias", "groups")))
    return Sample("moe_router", moe_router, given, faults)


SAMPLES = {_moe_router: 7}
"""Weight of each generator."""
