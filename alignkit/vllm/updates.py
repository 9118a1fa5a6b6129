"""Changes of an engine's weights: whole checkpoints of the engine's model alone, and no step while they change.

vLLM loads what it is given: a checkpoint of another model, half of one, or weights of two steps. The logprobs of such
an engine belong to no model, so its steps are rejected until the weights are whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator

import torch

from alignkit.convert import Architecture, Checkpoint, check_weights, read_architecture
from alignkit.engines.hook_points import relies_on
from alignkit.errors import InputError, UnsupportedError
from alignkit.vllm.epochs import Epochs


@contextlib.contextmanager
def stopping(epochs: Epochs) -> Iterator[None]:
    """Remember that an engine's step was rejected within the block.

    vLLM cannot go on after a failed step: in the engine's own process, later requests would wait forever.
    """
    try:
        yield
    except UnsupportedError as e:
        epochs.stopped = str(e)
        raise


@relies_on(
    "v1/core/sched/output.py:SchedulerOutput", members="scheduled_new_reqs scheduled_cached_reqs finished_req_ids"
)
@relies_on("v1/core/sched/output.py:CachedRequestData", members="req_ids resumed_req_ids")
class Updates:
    """The changes of one worker's weights.

    arch: the architecture that the engine was built for. epochs: what the worker's process knows of the engine. held:
    returns the requests whose KV cache the worker holds. touched: whether weights may have changed since `tell`.
    """

    def __init__(self, arch: Architecture, epochs: Epochs, held: Callable[[], Iterable[str]]) -> None:
        self._arch, self._epochs, self._held = arch, epochs, held
        self._mixed = self._lost = self._warming_up = self.touched = False
        self._stale: set[str] = set()
        self._missing: set[str] = set()
        self._reason: str | None = None
        self.epoch: int | None = None

    def step(self, scheduled) -> None:
        """Raise UnsupportedError if a step would not compute with the weights and the KV cache of one model.

        scheduled: vLLM's `SchedulerOutput`.
        """
        self.require_whole()
        if self._warming_up:
            return
        if self.epoch is None:
            raise UnsupportedError(
                "vLLM engine: must get its requests from a process that patch_vllm() has patched, got one that is not"
            )
        again = scheduled.scheduled_cached_reqs
        if self.touched and (scheduled.scheduled_new_reqs or again.resumed_req_ids):
            raise UnsupportedError(
                "weights: must be changed by calls of the engine, such as collective_rpc, whose workers are in other "
                "processes: otherwise cached prefixes of the old weights would be used"
            )
        if self._stale:
            new = [request.req_id for request in scheduled.scheduled_new_reqs]
            self._stale.difference_update(scheduled.finished_req_ids, again.resumed_req_ids, new)
            if not self._mixed and (stale := self._stale.intersection(again.req_ids)):
                raise UnsupportedError(
                    f"weights: must not change with requests in flight, whose KV cache would mix two models, got "
                    f"{len(stale)} requests"
                )

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Accept steps of the worker's own, whose requests come from no front end."""
        self._warming_up = True
        try:
            yield
        finally:
            self._warming_up = False

    def require_whole(self) -> None:
        """Raise UnsupportedError if the weights are not those of one model."""
        if self._epochs.problem is not None:
            raise UnsupportedError(self._epochs.problem)

    def tell(self, epoch: int, mixed: bool, failed: str | None) -> str | None:
        """Take the epoch of the next requests; return why the weights are those of no model, or None.

        mixed: whether the user asks for tokens of several epochs. failed: the call that may change weights and failed
        since the last epoch, or None.
        """
        if self.epoch not in (None, epoch):
            self._stale.update(self._held())
        if failed is not None:
            self._lose(f"{failed}: failed and may have changed some of the weights")
        self.epoch, self._mixed, self.touched = epoch, mixed, False
        return self._epochs.problem

    def begin(self, what: str) -> None:
        """Reject steps until `end` or `finish`."""
        self.touch()
        self._lost = False
        self._epochs.problem = (
            f"{what}: must be finished before the next request, because it has changed some of the weights"
        )

    def finish(self) -> None:
        """Accept steps, unless a part of the update failed."""
        self.touch()
        if not self._lost:
            self.end()

    def end(self) -> None:
        """Accept steps."""
        self._lost = False
        self._reason = None
        self._missing.clear()
        self._epochs.problem = None

    @contextlib.contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Reject steps within the block, and after it if it fails."""
        self.begin(what)
        with self.failing(what):
            yield
        self.end()

    @contextlib.contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Count the block as a change, and reject steps after it if it fails."""
        self.touch()
        first = self._reason
        try:
            yield
        except BaseException as e:
            self._reason = first  # a failure within the block gets the name of the call that users know
            self._lose(f"{what}: failed and may have changed some of the weights ({type(e).__name__}: {e})")
            raise

    def discarded(self) -> None:
        """Reject steps until every tensor has been loaded."""
        self.touch()
        self._lose("sleep(level=2): has discarded the weights")

    def _lose(self, reason: str) -> None:
        """Reject steps until every tensor has been loaded, for the first reason, of which others may be effects."""
        self._reason = self._reason or reason  # vLLM cannot always load weights after a load that failed
        self._lost = True
        self._missing = set(self._arch.hf_shapes())
        self._epochs.problem = f"{self._reason}. Load a whole checkpoint, or make a new engine"

    def watch(self, load_weights: Callable) -> Callable:
        """Return a model's `load_weights` that counts as a change; frameworks call it directly."""

        @functools.wraps(load_weights)
        def load(weights, *args, **kwargs):
            loaded: set[str] = set()
            with self.failing("load_weights"):
                result = load_weights(self.counted(weights, loaded), *args, **kwargs)
            if self._missing:
                self._missing -= loaded
                if not self._missing:
                    self.end()
            return result

        return load

    def touch(self) -> None:
        """Note that weights may have changed."""
        self._epochs.local += 1
        self.touched = True
        self._stale.update(self._held())

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
