"""Metric sinks of the monitor: TensorBoard, Weights & Biases and user functions.

A sink receives the metrics that `names` computes, and forwards them unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from ...errors import InputError, UnsupportedError

Sink = Callable[[int, dict[str, float]], None]


def make_sinks(sinks: Iterable[str | Sink] | None, directory: Path, rank: int) -> list[Sink]:
    """Return the functions to call with each step and its metrics; `Monitor` documents `sinks`."""
    if sinks is None:
        return [sink for sink in (_tensorboard(directory, rank), _wandb) if sink is not None]
    if isinstance(sinks, str):
        raise InputError(f"sinks: expected a list, such as ['wandb'], got the string {sinks!r:.80}")
    functions = []
    for sink in sinks:
        if sink == "tensorboard":
            functions.append(_tensorboard(directory, rank))
            if functions[-1] is None:
                raise UnsupportedError(
                    "sinks: 'tensorboard' requires torch.utils.tensorboard, which cannot be imported. "
                    "Run pip install tensorboard."
                )
        elif sink == "wandb":
            functions.append(_wandb)
        elif callable(sink):
            functions.append(sink)
        else:
            raise InputError(f"sinks: expected 'tensorboard', 'wandb' or a function, got {sink!r:.80}")
    return functions


def _tensorboard(directory: Path, rank: int) -> Sink | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    writer = SummaryWriter(str(directory / "tensorboard" / f"rank{rank:05d}"))

    def write(step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write


def _wandb(step: int, metrics: dict[str, float]) -> None:
    """Log to the active W&B run, if the training loop imported wandb and started one.

    wandb drops data logged for a step before the run's own. A loop that logs several times per step advances the run's
    step beyond `step`; the metrics are then logged at the run's step.
    """
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is not None:
        run.log(metrics | {"drift/step": step}, step=max(step, run.step))
