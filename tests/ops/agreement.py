"""Mismatched calls of two ranks, for test_agreement.py (gloo) and test_agreement_cuda.py (NCCL).

Each function runs on both ranks; rank `odd` makes a call that differs from the other rank's.
"""

import os
from unittest import mock

import torch

from alignkit import ops
from alignkit.dist import TP


def linear(tp, rows, row_parallel=False, device="cpu", **change):
    x, w = torch.ones(rows, 64, device=device), torch.ones(32, 64, device=device, requires_grad=True)
    (ops.row_parallel_linear if row_parallel else ops.linear)(x, w, tp=tp, **change)


def new_size_on_one_rank(tp, odd, row_parallel, device):
    """Compute 4, 8 and 4 rows on both ranks, then 6 rows, a new size, on rank `odd` and 4 on the other."""
    for rows in (4, 8, 4):
        linear(tp, rows, row_parallel, device)
    linear(tp, 6 if tp.rank == odd else 4, row_parallel, device)


def check_fails_on_one_rank(tp, odd, device):
    def checks():
        if tp.rank == odd:
            raise KeyError("a mistake of the caller")
        return {"rows": 4}

    tp.check_same("an op", checks)


def strict_on_one_rank(tp, odd, device):
    with mock.patch.dict(os.environ, {"ALIGNKIT_STRICT": "1" if tp.rank == odd else "0"}):
        linear(tp, 4, device=device)


def gradients_on_one_rank(tp, odd, device):
    with torch.set_grad_enabled(tp.rank != odd):
        linear(tp, 4, device=device)


def head(tp, device="cpu", **change):
    generator = torch.Generator("cpu").manual_seed(0)
    hidden, weight = torch.randn(6, 64, generator=generator), torch.randn(256, 64, generator=generator)
    arguments = {"target": torch.arange(6) * 40, "temperature": torch.full((6,), 0.7)} | change
    arguments = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}
    return ops.linear_logp(
        hidden.to(device),
        weight.chunk(tp.size)[tp.rank].to(device),
        **arguments,
        vocab_start=len(weight) // tp.size * tp.rank,
        tp=tp,
    )


OTHER_TARGET = torch.tensor([0, 40, 80, 121, 160, 200], device="cpu")
IGNORED = torch.tensor([0, -100, 80, 120, 160, 200], device="cpu")
MOVED = torch.tensor([0, 40, 120, 80, 160, 200], device="cpu")
"""The same targets in other rows."""
HEADS = {
    "target (hash of its values): must be equal": {"target": OTHER_TARGET},
    "target (hash of its values): must be equal on": {"target": IGNORED},
    "target (hash of its values): must be equal on all": {"target": MOVED},
    "temperature (hash of its values): must be equal": {"temperature": torch.tensor([0.7] * 5 + [0.71], device="cpu")},
}
"""Beginning of the error, and the arguments that one rank changes; its length only distinguishes keys."""
HEAD_SETTINGS = {
    "temperature: must be equal": {"temperature": 0.5},
    "ignore_index: must be equal": {"ignore_index": -1},
    "return_entropy: must be equal": {"return_entropy": True},
    "soft_cap: must be equal": {"soft_cap": 3.0},
    "workspace: must be equal": {"workspace": 1 << 16},
}


def head_changed_on_one_rank(tp, odd, change, device):
    return head(tp, device, **(change if tp.rank == odd else {}))


def death_of_one_rank(tp, odd):
    if tp.rank == odd:
        os._exit(3)
    linear(TP(tp.group), 4)
