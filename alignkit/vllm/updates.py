"""Changes of an engine's weights: whole checkpoints of the engine's model alone, and no step while they change.

vLLM loads what it is given: a checkpoint of another model, half of one, or weights of two steps. The logprobs of such
an engine belong to no model, so its steps are rejected until the weights are whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator

import torch

from alignkit.convert import Architecture, Checkpoint, check_weights, read_architecture
from alignkit.errors import InputError, UnsupportedError

_stopped: dict[int, str] = {}
"""Engines of this process with a rejected step, by the id of their configuration -> the reason."""


@contextlib.contextmanager
def stopping(config) -> Iterator[None]:
    """Remember that an engine's step was rejected within the block. config: its `VllmConfig`.

    vLLM cannot go on after a failed step: in the engine's own process, later requests would wait forever.
    """
    try:
        yield
    except UnsupportedError as e:
        _stopped[id(config)] = str(e)
        raise


def stopped(config) -> str | None:
    """Return why an engine of this process stopped, or None."""
    return _stopped.get(id(config))


def started(config) -> None:
    """Forget an earlier engine whose configuration had the same id."""
    _stopped.pop(id(config), None)


class Updates:
    """The changes of one worker's weights. arch: the architecture that the engine was built for."""

    def __init__(self, arch: Architecture) -> None:
        self._arch = arch
        self._problem: str | None = None
        self._failure: str | None = None

    def step(self) -> None:
        """Raise UnsupportedError if a step would not compute with the weights of one model."""
        self.require_whole()

    def require_whole(self) -> None:
        """Raise UnsupportedError if the weights are not those of one model."""
        if self._problem is not None:
            raise UnsupportedError(self._problem)

    def begin(self, what: str) -> None:
        """Reject steps until `end`."""
        self._problem = f"{what}: must be finished before the next request, because it has changed some of the weights"

    def end(self) -> None:
        """Accept steps."""
        self._problem = self._failure = None

    @contextlib.contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Reject steps within the block, and after it if it fails: for the first failure, of which others may follow.

        vLLM cannot always load weights after a load that failed.
        """
        first = self._failure
        self.begin(what)
        try:
            yield
        except BaseException as e:
            self._problem = self._failure = first or (
                f"{what}: failed and may have changed some of the weights ({type(e).__name__}: {e}). Load a whole "
                "checkpoint, or make a new engine"
            )
            raise
        self.end()

    def check_files(self, path: str | os.PathLike) -> None:
        """Require a whole checkpoint of the engine's model in an HF directory, before anything is loaded.

        Raises:
            UnsupportedError: config.json describes another model, or the files have other tensors.
            InputError: a tensor is missing or has another shape.
        """
        found = read_architecture(path)
        for field in dataclasses.fields(Architecture):
            mine, theirs = getattr(self._arch, field.name), getattr(found, field.name)
            if mine != theirs:
                raise UnsupportedError(
                    f"weights_path: config.json must describe the engine's model, whose {field.name} is {mine}, got "
                    f"{theirs}. Make a new engine for another model"
                )
        check_weights(self._arch, Checkpoint(path))

    def counted(
        self, weights: Iterable[tuple[str, torch.Tensor]], names: set[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors in HF format and add their names to `names`."""
        for name, tensor in weights:
            names.add(name)
            yield name, tensor

    def require_all(self, names: set[str]) -> None:
        """Raise InputError unless `names` has every HF tensor of the engine's model."""
        missing = [name for name in self._arch.hf_shapes() if name not in names]
        if missing:
            raise InputError(
                f"weights_iterator: must yield every tensor of the model, got none for {len(missing)}, first "
                f"{missing[0]!r}"
            )
