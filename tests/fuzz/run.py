"""Runs of random calls and of rank faults, and the counts of their verdicts; __main__.py and the tests call it.

Keys of `Tally.rows` are stored in benchmarks/results/cpu/fuzz.jsonl.
"""

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

from alignkit.runtime import validated

from . import draw, faults, pair, pool
from .judge import GOOD, VERDICTS

CALL_LIMIT = 30.0
"""Timeout of a call in seconds; most calls take milliseconds."""
MAX_REPORTED = 20
"""Largest number of failures to print."""
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None


@dataclass
class Tally:
    """Verdict counts and failures.

    Attributes:
        option: Command-line option that repeats a failure.
        by: Verdict counts by op, or by kind of fault.
        failures: Bad verdicts, each with the command that repeats it.
        seconds: Duration of the run.
    """

    option: str
    by: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    failures: list[dict] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, group: str, verdict: str, identifier: str, text: str, detail: str) -> None:
        self.by[group][verdict] += 1
        if verdict not in GOOD:
            self.failures.append(
                {
                    "verdict": verdict,
                    "by": group,
                    "draw": text,
                    "detail": detail,
                    "repeat": f"python -m tests.fuzz {self.option} {identifier}",
                }
            )

    def totals(self) -> Counter:
        return sum(self.by.values(), Counter())

    def rows(self, what: str) -> list[dict]:
        """Return the counts of all verdicts, with the failures, then those by op or kind of fault (``by``)."""

        def row(counts: Counter, **more) -> dict:
            return {"what": what} | more | {"drawn": sum(counts.values())} | {v: counts[v] for v in VERDICTS}

        total = row(self.totals()) | {"seconds": round(self.seconds, 1), "failures": self.failures}
        return [total, *(row(self.by[group], by=group) for group in sorted(self.by))]

    def report(self) -> str:
        """Return the failures as text."""
        counts = ", ".join(f"{n} {v}" for v, n in self.totals().items())
        lines = [
            f"{f['verdict']}: {f['draw']}\n    {f['detail']}\n    {f['repeat']}" for f in self.failures[:MAX_REPORTED]
        ]
        more = [f"and {len(self.failures) - MAX_REPORTED} more"] if len(self.failures) > MAX_REPORTED else []
        return "\n".join([counts, *lines, *more])


def calls(seed: int, indices: Iterable[int], workers: int | None = None, done: Callable = lambda: None) -> Tally:
    """Run the random calls with these indices, seeded with `seed`, in `workers` processes (default: one per core).

    `done()` is called after each call.
    """
    for backend in ("cpu", "reference"):  # an unvalidated torch version runs the golden tests in the first call
        validated.require(torch.device("cpu"), backend)
    tally, started = Tally("--only"), time.monotonic()
    jobs, workers = ((seed, i) for i in indices), workers or len(os.sched_getaffinity(0))
    for job, outcome, value in pool.outcomes("tests.fuzz.judge:judge", jobs, workers, CALL_LIMIT):
        identifier = "{}:{}".format(*job)
        if outcome == "failed":
            raise RuntimeError(f"the fuzzer itself failed at --only {identifier}:\n{value}")
        if outcome == "done":
            tally.add(value["op"], value["verdict"], identifier, value["text"], value["detail"])
        else:
            call = draw.draw(*job)
            tally.add(call.sample.op, outcome, identifier, call.text(), value)
        done()
    tally.seconds = time.monotonic() - started
    return tally


def rank_faults(seed: int, indices: Iterable[int], device: str = "cpu", done: Callable = lambda: None) -> Tally:
    """Run the random faults with these indices, seeded with `seed`, on two ranks: CPU processes or GPUs.

    `done()` is called after each fault.
    """
    tally, started = Tally("--only-fault" if device == "cpu" else f"--device {device} --only-fault"), time.monotonic()
    with checkpoints() as (folders, log):
        for fault, verdict, reason in pair.outcomes(((seed, i) for i in indices), device, folders, log):
            tally.add(fault.kind, verdict, f"{fault.seed}:{fault.index}", fault.text(), reason)
            done()
    tally.seconds = time.monotonic() - started
    return tally


@contextlib.contextmanager
def checkpoints() -> Iterator[tuple[dict[str, str], str]]:
    """Yield the path of a tiny checkpoint per model, and a log file for the ranks' output."""
    from alignkit.jobs.model import make_checkpoint

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
