"""The constants of the numerics contract. `docs/contract.md` says what they mean.

Two logprobs may be compared bit for bit only if they carry the same contract id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import InputError

if TYPE_CHECKING:
    import torch

VERSION = {"cpu": 1, "sm90": 4}
"""By device family: a change of bits on one leaves the logprobs saved on the other comparable."""
VOCAB_TILE = 128
"""Width, in global vocabulary ids, of one leaf of the log-softmax."""
K_LEAVES = 8
"""Most leaves of a row-parallel product; `k_leaves` gives the number for a given k."""
K_STEP = 16
"""A leaf of a row-parallel product is a multiple of this many k."""
KV_BLOCK = {"cpu": 32, "sm90": 64}
"""Keys and values are visited in blocks of this many positions, from position 0; by device family."""
SUM_LANES = 16
"""Lanes of the sum of squares in rms_norm."""
HEAD_ROWS = {"cpu": None, "sm90": 8192}
"""Gradient of the head's weight: rows of one chain; the chains of later rows are added in order. None: one chain."""


def k_leaves(k: int) -> int:
    """Number of leaves of a row-parallel product over `k` (the global k): the largest power of two
    up to `K_LEAVES` that cuts k into equal multiples of `K_STEP`; 1 if there is none."""
    leaves = K_LEAVES
    while leaves > 1 and k % (leaves * K_STEP):
        leaves //= 2
    return leaves


def contract_id(device: torch.device | torch.Tensor | str | None = None) -> str:
    """Identity of the contract on a device family, e.g. ``alignkit-1/cpu/v128/k8/kv32``.

    device: what computed the numbers: a device or its name (``"cuda"``), a tensor that lies where they were computed,
        such as a weight, or a family (``"cpu"``, ``"sm90"``). Of a running engine ask the engine instead:
        `alignkit.vllm.worker_status(llm)[0]["contract"]`, `alignkit.megatron.status(model)["contract"]`.

    Raises InputError without a device, for there is none that is right by default, and BackendError for one on which
    alignkit has no backend.
    """
    family = device if isinstance(device, str) and device in VERSION else _family(device)
    return f"alignkit-{VERSION[family]}/{family}/v{VOCAB_TILE}/k{K_LEAVES}/kv{KV_BLOCK[family]}"


def _family(device: torch.device | torch.Tensor | str | None) -> str:
    import torch

    from . import backends

    given = device.device if isinstance(device, torch.Tensor) else device
    if isinstance(given, str):
        try:
            given = torch.device(given)
        except RuntimeError:
            raise InputError(f"device: {device!r} is neither a device nor one of {', '.join(VERSION)}") from None
    if not isinstance(given, torch.device):
        raise InputError(
            f"device: {given!r}; contract_id needs the device that computed the numbers, such as "
            "weight.device or 'cuda'"
        )
    return backends.family(given)
