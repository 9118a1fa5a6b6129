"""Cold-cache timing of ops, on the GPU and on the CPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

CACHE = 1 << 28
"""Bytes written to flush the GPU's L2 cache."""
MAX_FLUSHES = 20
"""Largest number of flushes before a timed call, which give the host time to enqueue it."""
ROUNDS = (5, 200)
"""Smallest and largest number of timed calls."""
COPY_BYTES = 1 << 30
"""Size of the copy in `copy_speed`."""


class Stopwatch:
    """A timer of calls that start with a cold cache: CUDA events on a GPU, the clock on the CPU."""

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

    def _flushes(self, run: Callable) -> int:
        """Return the number of flushes that take longer than the host needs to enqueue `run`."""
        run()
        self.synchronize()
        if self.cache is None:
            return 0
        started = time.perf_counter()
        run()
        host = (time.perf_counter() - started) * 1e3
        self.synchronize()
        return min(1 + math.ceil(host / self.flush_ms), MAX_FLUSHES)

    def _round(self, runs: list[Callable], flushes: list[int]) -> list[tuple]:
        marks = []
        for run, count in zip(runs, flushes, strict=True):
            self._flush(count)
            start = self._now()
            run()
            marks.append((start, self._now()))
        return marks

    def medians(self, runs: list[Callable], seconds: float) -> list[float]:
        """Return the median milliseconds of each of `runs`, whose interleaved calls take about `seconds` in total."""
        flushes = [self._flushes(run) for run in runs]
        started = time.perf_counter()
        self._round(runs, flushes)
        self.synchronize()
        once = time.perf_counter() - started
        rounds = min(max(int(seconds / once), ROUNDS[0]), ROUNDS[1])
        marks = [self._round(runs, flushes) for _ in range(rounds)]
        self.synchronize()
        return [statistics.median(self._between(*mark) for mark in mine) for mine in zip(*marks, strict=True)]


def copy_speed(watch: Stopwatch) -> float:
    """Return the bandwidth of a copy, in bytes read plus written per second."""
    source = torch.randn(COPY_BYTES // 4, device=watch.device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / (watch.medians([lambda: target.copy_(source)], 0.5)[0] / 1e3)
