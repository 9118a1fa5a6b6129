"""Where metrics go beside the monitor's own file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from ...errors import InputError, UnsupportedError

Sink = Callable[[int, dict[str, float]], None]


def make(sinks: Iterable[str | Sink] | None, directory: Path, rank: int) -> list[Sink]:
    """The functions to call with each step's metrics; `Monitor` says what `sinks` may hold."""
    if sinks is None:
        return [sink for sink in (_tensorboard(directory, rank), _wandb) if sink is not None]
    if isinstance(sinks, str):
        raise InputError(f"sinks: {sinks!r}, expected a list")
    made = []
    for sink in sinks:
        if sink == "tensorboard":
            made.append(_tensorboard(directory, rank))
            if made[-1] is None:
                raise UnsupportedError(
                    "sinks: 'tensorboard' needs torch.utils.tensorboard, which cannot be imported: "
                    "pip install tensorboard"
                )
        elif sink == "wandb":
            made.append(_wandb)
        elif callable(sink):
            made.append(sink)
        else:
            raise InputError(f"sinks: {sink!r:.80} is neither 'tensorboard' nor 'wandb' nor a function")
    return made


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
    """To the active run, if the loop has imported wandb and begun one: it is never begun here. wandb drops what is logged
    for a step before its own, which loops that log several times in a step are ahead by: that joins wandb's own step."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is not None:
        run.log(metrics | {"drift/step": step}, step=max(step, run.step))
