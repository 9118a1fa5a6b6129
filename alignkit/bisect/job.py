"""Job files of the engine processes and the recordings they write.

Fields of a job:

- ``engine``: "vllm", "megatron" or "hf".
- ``patched``: bool.
- ``model``: HF directory; ``weights``: its digest.
- ``dtype``, ``tp``, ``seed``.
- ``mode`` (megatron, hf): micro-batches "padded", "one" or "packed".
- ``chunk`` (vllm): maximum tokens per step, or null.
- ``batch_invariant`` (vllm, optional): run with VLLM_BATCH_INVARIANT=1.
- ``decode`` (vllm): tokens sampled after each sequence, 0 for none.
- ``swap``: list of `points.OPS` computed by alignkit.
- ``keep``: map from point to the rows whose values are recorded, or null to record digests.
- ``sample`` (optional): rows whose values are recorded at every point in addition to the digests.
- ``sequences``: token ids.
- ``runs``: one entry ``{"out": recording.json}``. A key ``"in"`` names a recording.json with the sequences.

`run` and benchmarks/where_drift.py write jobs; the ``*_side`` modules and `vllm_worker` read them.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from ..convert import read_architecture
from ..runtime.machine import versions
from . import recording
from .recording import Recorder, Recording


def read(path: str) -> dict:
    job = json.loads(Path(path).read_text())
    run = job["runs"][0]
    if "in" in run:
        job["sequences"] = json.loads(Path(run["in"]).read_text())["sequences"]
    Path(run["out"]).parent.mkdir(parents=True, exist_ok=True)
    return job


def part(job: dict, rank: int) -> Path:
    return Path(job["runs"][0]["out"]).parent / f"rank{rank}.safetensors"


def recorder(job: dict) -> Recorder:
    rows = sum(map(len, job["sequences"])) + job["decode"] * len(job["sequences"])
    return Recorder(read_architecture(job["model"]), rows, job["keep"], job["tp"], job.get("sample", ()))


def finish(
    job: dict, engine: str, contract: str, sequences: list[list[int]], settings: dict, extra: Path | None = None
) -> Recording:
    """Merge the ranks' parts, write the recording and delete the parts.

    extra: an additional part with points that no rank recorded.
    """
    arch = read_architecture(job["model"])
    parts = [part(job, rank) for rank in range(job["tp"])]
    settings = {
        "dtype": job["dtype"],
        "tp": job["tp"],
        "swap": ", ".join(job["swap"]),
        **settings,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": versions(),
    }
    merged = recording.merge(
        parts,
        extra,
        arch,
        engine=engine,
        contract=contract,
        architecture=asdict(arch),
        weights=job["weights"],
        sequences=sequences,
        settings=settings,
    )
    merged.save(Path(job["runs"][0]["out"]).parent)
    for path in [*parts, *([extra] if extra else [])]:
        path.unlink()
    return merged


def micro_batches(sequences: list[list[int]], mode: str) -> list[tuple[torch.Tensor, np.ndarray]]:
    """Return (token ids [b, s], rows [b, s] with -1 for padding) of each micro-batch in mode "padded" or "one"."""
    starts = np.cumsum([0] + [len(s) for s in sequences])
    groups = [[i] for i in range(len(sequences))] if mode == "one" else [list(range(len(sequences)))]
    batches = []
    for group in groups:
        longest = max(len(sequences[i]) for i in group)
        tokens = torch.zeros(len(group), longest, dtype=torch.int64)
        rows = np.full((len(group), longest), -1, dtype=np.int64)
        for j, i in enumerate(group):
            n = len(sequences[i])
            tokens[j, :n] = torch.tensor(sequences[i])
            rows[j, :n] = starts[i] + np.arange(n)
        batches.append((tokens, rows))
    return batches


def targets(tokens: torch.Tensor, rows: np.ndarray, ignore: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return each position's next token and its row, shaped like `tokens`; (`ignore`, -1) if it has no next token."""
    labels = torch.full_like(tokens, ignore)
    known = np.full_like(rows, -1)
    follows = (rows[:, 1:] >= 0) & (rows[:, :-1] >= 0)
    labels[:, :-1] = torch.where(torch.from_numpy(follows), tokens[:, 1:], ignore)
    known[:, :-1] = np.where(follows, rows[:, :-1], -1)
    return labels, known
