"""How the benchmarks of ops take times."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

CACHE = 1 << 28
"""Bytes that are written to empty the GPU's cache."""
LEAD = 20
"""Times that they are written at most before a call is timed, so that it is in the queue before the GPU comes to it."""
ROUNDS = (5, 200)
"""Timed calls: at least, and at most."""
COPIED = 1 << 30
"""Bytes of the copy of `copy_speed`."""


class Stopwatch:
    """Times of calls, from a cold cache: on a GPU between events, on the CPU by the clock."""

    def __init__(self, device: torch.device):
        self.device, self.cache = device, None
        if device.type == "cuda":
            self.cache = torch.empty(CACHE, dtype=torch.int8, device=device)
            self._flush(3)
            self.flush_ms = self._ms(partial(self._flush, 10)) / 10

    def synchronize(self) -> None:
        if self.cache is not None:
            torch.cuda.synchronize(self.device)

    def _flush(self, times: int) -> None:
        for _ in range(times):
            self.cache.zero_()

    def _now(self):
        if self.cache is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start, end) -> float:
        return start.elapsed_time(end) if self.cache is not None else (end - start) * 1e3

    def _ms(self, run: Callable) -> float:
        start = self._now()
        run()
        end = self._now()
        self.synchronize()
        return self._between(start, end)

    def _lead(self, run: Callable) -> int:
        """How often the cache is emptied before `run`, that the host may be done with it first."""
        run()
        self.synchronize()
        if self.cache is None:
            return 0
        started = time.perf_counter()
        run()
        host = (time.perf_counter() - started) * 1e3
        self.synchronize()
        return min(1 + math.ceil(host / self.flush_ms), LEAD)

    def _round(self, runs: list[Callable], leads: list[int]) -> list[tuple]:
        marks = []
        for run, lead in zip(runs, leads, strict=True):
            self._flush(lead)
            start = self._now()
            run()
            marks.append((start, self._now()))
        return marks

    def medians(self, runs: list[Callable], seconds: float) -> list[float]:
        """Milliseconds that each of `runs` takes, called by turns for about `seconds`."""
        leads = [self._lead(run) for run in runs]
        started = time.perf_counter()
        self._round(runs, leads)
        self.synchronize()
        once = time.perf_counter() - started
        rounds = min(max(int(seconds / once), ROUNDS[0]), ROUNDS[1])
        marks = [self._round(runs, leads) for _ in range(rounds)]
        self.synchronize()
        return [statistics.median(self._between(*mark) for mark in mine) for mine in zip(*marks, strict=True)]


def copy_speed(watch: Stopwatch) -> float:
    """Bytes that a copy reads and writes a second."""
    source = torch.randn(COPIED // 4, device=watch.device)
    target = torch.empty_like(source)
    return 2 * COPIED / (watch.medians([lambda: target.copy_(source)], 0.5)[0] / 1e3)
