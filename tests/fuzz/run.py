"""Runs the fuzz and counts what came of it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from alignkit.runtime import shown

from . import draw, faults, pair, pool
from .judge import GOOD, VERDICTS

CALL_LIMIT = 30.0
"""Seconds that a call may take; most take some milliseconds."""
SHOWN = 20
"""Failures that are printed."""
MEGATRON = importlib.util.find_spec("megatron") is not None


@dataclass
class Tally:
    """by: verdicts counted by op, or by kind of fault. failures: what must not be, with how to repeat it."""

    option: str
    by: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    failures: list[dict] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, group: str, verdict: str, draw: str, text: str, detail: str) -> None:
        self.by[group][verdict] += 1
        if verdict not in GOOD:
            self.failures.append(
                {
                    "verdict": verdict,
                    "by": group,
                    "draw": text,
                    "detail": detail,
                    "repeat": f"python -m tests.fuzz {self.option} {draw}",
                }
            )

    def totals(self) -> Counter:
        return sum(self.by.values(), Counter())

    def to_json(self) -> dict:
        """Counts, all verdicts named, and the failures."""

        def row(counts: Counter) -> dict:
            return {"drawn": sum(counts.values())} | {v: counts[v] for v in VERDICTS}

        return row(self.totals()) | {
            "seconds": round(self.seconds, 1),
            "by": {group: row(self.by[group]) for group in sorted(self.by)},
            "failures": self.failures,
        }

    def told(self) -> str:
        """The failures, for a person."""
        counts = ", ".join(f"{n} {v}" for v, n in self.totals().items())
        lines = [f"{f['verdict']}: {f['draw']}\n    {f['detail']}\n    {f['repeat']}" for f in self.failures[:SHOWN]]
        more = [f"and {len(self.failures) - SHOWN} more"] if len(self.failures) > SHOWN else []
        return "\n".join([counts, *lines, *more])


def calls(seed: int, numbers: Iterable[int], workers: int | None = None, done: Callable = lambda: None) -> Tally:
    """Calls `numbers` of the population `seed`, in a process for each core or `workers`; `done()` after each."""
    for backend in ("cpu", "reference"):  # with a torch that no bits were shown with, the first call tests them all
        shown.require(torch.device("cpu"), backend)
    tally, started = Tally("--only"), time.monotonic()
    jobs, workers = ((seed, i) for i in numbers), workers or len(os.sched_getaffinity(0))
    for job, how, value in pool.outcomes("tests.fuzz.judge:judge", jobs, workers, CALL_LIMIT):
        name = "{}:{}".format(*job)
        if how == "failed":
            raise RuntimeError(f"the fuzz itself failed at --only {name}:\n{value}")
        if how == "done":
            tally.add(value["op"], value["verdict"], name, value["text"], value["detail"])
        else:
            call = draw.draw(*job)
            tally.add(call.problem.op, how, name, call.text(), value)
        done()
    tally.seconds = time.monotonic() - started
    return tally


def rank_faults(seed: int, numbers: Iterable[int], device: str = "cpu", done: Callable = lambda: None) -> Tally:
    """Faults `numbers` of the population `seed` on two ranks: processes on the CPU, or GPUs."""
    tally, started = Tally("--only-fault" if device == "cpu" else f"--device {device} --only-fault"), time.monotonic()
    with checkpoints() as (made, log):
        for fault, verdict, how in pair.outcomes(((seed, i) for i in numbers), device, made, log):
            tally.add(fault.kind, verdict, f"{fault.seed}:{fault.index}", fault.text(), how)
            done()
    tally.seconds = time.monotonic() - started
    return tally


@contextlib.contextmanager
def checkpoints() -> Iterator[tuple[dict[str, str], str]]:
    """A tiny checkpoint of each model, and a file for what ranks say."""
    from alignkit.check.model import make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ranks.log"
        log.touch()
        yield (
            {
                name: str(make_checkpoint(Path(folder) / name, arch=arch, dtype=dtype, tied=tied, **faults.SIZES))
                for name, (arch, dtype, tied) in faults.MODELS.items()
            },
            str(log),
        )


def two_gpus() -> bool:
    return torch.cuda.device_count() >= 2
