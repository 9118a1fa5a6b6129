"""Input sequences of a bisection, read from a logprob file or from a `Monitor`'s replay file.

The formats are defined in `drift.files` and `drift.monitor.replay`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ..drift import bounded, files
from ..drift.monitor import replay
from ..drift.monitor.replay import Replay
from ..errors import InputError
from ..runtime.machine import family

MAX_SEQUENCES = 16
"""Maximum number of sequences taken from a replay."""


def read(path: Path) -> tuple[list[list[int]], Replay | None]:
    """Return (token ids, the replay or None); raise InputError naming the file and the problem."""
    with bounded.opened(path, "a file of tokens", files.MAX_HEADER) as (_, metadata):
        is_replay = metadata.get("format") == replay.FORMAT
    if is_replay:
        loaded = replay.load_replay(path)
        return _replay_sequences(path, loaded), loaded
    logprobs = files.load(path)
    return [p + t for p, t in zip(logprobs.prompts, logprobs.tokens, strict=True)], None


def check_contract(path: Path, loaded: Replay, aligned: bool) -> None:
    """Raise InputError if this machine's aligned engines have a different contract than the replay's run."""
    ours = family().contract_id
    theirs = loaded.info.get("contract")
    if aligned and theirs not in (ours, [ours, ours]):
        raise InputError(
            f"{path}: contract: must be the contract id of aligned engines on this machine, {ours!r}, "
            f"got {theirs!r:.200}"
        )


def _replay_sequences(path: Path, loaded: Replay) -> list[list[int]]:
    """Return up to `MAX_SEQUENCES` distinct sequences with a logprob that differs, or of all if none does."""
    input_ids = loaded.context.get("input_ids")
    if input_ids is None:
        raise InputError(
            f"{path}: the replay has no prompts: tensor 'context.input_ids' is missing. "
            "Pass context={'input_ids': ..., 'attention_mask': ...} to Monitor.log in the training loop."
        )
    mask = loaded.context.get("attention_mask", torch.ones_like(input_ids))
    rows = len(loaded.mask)
    for name, x in (("input_ids", input_ids), ("attention_mask", mask)):
        if x.is_floating_point():
            raise InputError(f"{path}: tensor 'context.{name}': must have an integer dtype, got {x.dtype}")
        if x.ndim != 2 or len(x) != rows:
            raise InputError(f"{path}: tensor 'context.{name}': must have shape [{rows}, T], got {list(x.shape)}")
        if x.shape != input_ids.shape:
            raise InputError(
                f"{path}: tensor 'context.{name}': must have the shape of 'context.input_ids', "
                f"{list(input_ids.shape)}, got {list(x.shape)}"
            )
    differ = (
        loaded.rollout_logp.float().view(torch.int32) != loaded.train_logp.float().view(torch.int32)
    ) & loaded.mask
    chosen = differ.any(1).nonzero().flatten().tolist() or range(rows)
    sequences = (tuple(input_ids[i][mask[i] != 0].tolist()) for i in chosen)
    return [list(s) for s in dict.fromkeys(sequences) if s][:MAX_SEQUENCES]
