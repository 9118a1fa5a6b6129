"""The sequences that both sides run: of a logprob file, or of the batch that a `Monitor` kept when it raised its alarm."""

from __future__ import annotations

from pathlib import Path

import torch

from ...check.machine import family
from ...errors import InputError
from .. import bounded, files
from ..monitor import replay
from ..monitor.replay import Replay

MOST = 16
"""Sequences of a replay that are run."""


def read(path: Path) -> tuple[list[list[int]], Replay | None]:
    """(token ids, the replay if it is one). Raises InputError naming the file and what is wrong with it."""
    with bounded.opened(path, "a file of tokens", files.MAX_HEADER) as (_, metadata):
        is_replay = metadata.get("format") == replay.FORMAT
    if is_replay:
        found = replay.load_replay(path)
        return _of_replay(path, found), found
    logprobs = files.load(path)
    return [p + t for p, t in zip(logprobs.prompts, logprobs.tokens, strict=True)], None


def check_contract(path: Path, found: Replay, aligned: bool) -> None:
    """Raise InputError if aligned engines of this machine would compute other bits than those of the replay's run."""
    ours = family().contract_id
    theirs = found.info.get("contract")
    if aligned and theirs not in (ours, [ours, ours]):
        raise InputError(f"{path}: a replay under contract {theirs!r:.200}; aligned engines here are under {ours!r}")


def _of_replay(path: Path, found: Replay) -> list[list[int]]:
    """Those with a logprob that differed, at most `MOST`, each once."""
    whole = found.context.get("input_ids")
    if whole is None:
        raise InputError(
            f"{path}: the replay has no prompts: give Monitor.log context={{'input_ids': ..., 'attention_mask': ...}}"
        )
    mask = found.context.get("attention_mask", torch.ones_like(whole))
    rows = len(found.mask)
    for name, x in (("input_ids", whole), ("attention_mask", mask)):
        if x.ndim != 2 or len(x) != rows or x.shape != whole.shape or x.is_floating_point():
            raise InputError(
                f"{path}: context.{name} is {x.dtype} of shape {tuple(x.shape)}, expected whole numbers [{rows}, T]"
            )
    differ = (found.rollout_logp.float().view(torch.int32) != found.train_logp.float().view(torch.int32)) & found.mask
    chosen = differ.any(1).nonzero().flatten().tolist() or range(rows)
    sequences = (tuple(whole[i][mask[i] != 0].tolist()) for i in chosen)
    return [list(s) for s in dict.fromkeys(sequences) if s][:MOST]
