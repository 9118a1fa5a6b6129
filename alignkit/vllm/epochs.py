"""Epochs of an engine's weights, as the process of its front end counts them: a number that grows with each change.

KV-cache entries and tokens belong to the epoch of the weights that computed them. vLLM does not tell them apart: it
reuses cached prefixes across changes, and goes on with requests in flight. `client` counts the calls that may change
weights, keeps the cached prefixes of epochs apart and rejects a change that would mix two models. `updates` checks the
same in the workers. No vLLM code.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from alignkit.errors import InputError
from alignkit.identity.identity import MIXED

KEY = "alignkit"
"""Key in a request output's `kv_transfer_params`."""
READS = frozenset(
    """
    alignkit_epoch alignkit_record alignkit_save alignkit_status alignkit_weights check_health compute_weight_checksums
    get_cache_block_size_bytes get_kv_cache_spec get_kv_connector_handshake_metadata get_supported_tasks
    init_weight_transfer_engine list_loras profile reset_encoder_cache reset_mm_cache shutdown_weight_transfer_engine
    synchronize_device
    """.split()
)
"""Methods of vLLM's and alignkit's workers that change no weights. A call of any other method counts as a change."""


@dataclass(slots=True)
class Tokens:
    """Epochs of a request's sampled tokens. spans: (index of the first token, epoch), ascending."""

    spans: list[tuple[int, int]]

    def begin(self, epoch: int, count: int) -> None:
        """Start a span. count: tokens before it."""
        if self.spans[-1][1] == epoch:
            return
        if self.spans[-1][0] == count:
            self.spans.pop()
        self.spans.append((count, epoch))

    def epochs(self, count: int) -> list[int]:
        """Return the epoch of each of the first `count` tokens."""
        ends = [start for start, _ in self.spans[1:]] + [count]
        runs = (
            itertools.repeat(epoch, max(0, min(end, count) - start))
            for (start, epoch), end in zip(self.spans, ends, strict=True)
        )
        return list(itertools.chain.from_iterable(runs))


@dataclass
class Epochs:
    """The epochs of one engine and its requests in flight.

    epoch: the current one; 0 are the weights of the engine's start. told: the last epoch that the workers know, None
    before the first. contract: the workers' contract id, None before they know an epoch. problem: why the weights are
    those of no model, or None. stopped: why the engine cannot go on, or None. local: changes that a worker in this
    process made, whether or not the client called it. running: requests sent to the engine. finished: requests whose
    last output has not been read yet. weights: digests of fingerprints by epoch, as far as they were computed. count:
    returns the number of a request's tokens that have arrived. paused: no step runs. cleared: no step runs, and no
    request in flight has a KV cache.
    """

    epoch: int = 0
    told: int | None = None
    contract: str | None = None
    problem: str | None = None
    stopped: str | None = None
    local: int = 0
    running: dict[str, Tokens] = field(default_factory=dict)
    finished: dict[str, Tokens] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)
    count: Callable[[str], int] = lambda request: 0
    paused: bool = False
    cleared: bool = False
    _seen: int = 0

    def refusal(self) -> str | None:
        """Return why no request can be added, or None."""
        if self.stopped is not None:
            return f"vLLM engine: a step was rejected, so make a new engine. Reason: {self.stopped}"
        return self.problem

    def why_not(self, what: str, mixed: bool) -> str | None:
        """Return why the weights must not change now, or None. mixed: the user asks for tokens of several epochs."""
        if not self.running or (self.paused and (self.cleared or mixed)):
            return None
        state = "paused without clearing it" if self.paused else "not paused"
        return (
            f"{what}: must not change weights with requests in flight, whose KV cache would mix two models, got "
            f"{len(self.running)} requests, {state}. Wait for them, abort them, or call pause_generation(mode='keep', "
            "clear_cache=True) before the update and resume_generation() after it (docs/identity.md)"
        )

    def keeps_cache(self) -> bool:
        """Return whether requests in flight would go on with a KV cache of older weights after a change."""
        return bool(self.running) and not self.cleared

    def change(self) -> None:
        """Count a change of the weights."""
        self.epoch += 1
        epoch = MIXED if self.keeps_cache() else self.epoch
        for request, tokens in self.running.items():
            tokens.begin(epoch, self.count(request))

    def changed(self) -> None:
        """Note that a change is complete, with all that a worker of this process did in it."""
        self._seen = self.local

    def notice(self) -> None:
        """Count the changes that a worker of this process made without a call of the client."""
        if self._seen != self.local:
            self.changed()
            self.change()

    def pause(self, cleared: bool) -> None:
        """Note that no step runs. cleared: the KV cache was cleared too, also that of the requests in flight."""
        self.paused = True
        if cleared:
            self.clear()

    def clear(self) -> None:
        """Note that the KV cache was cleared, also that of the requests in flight."""
        self.cleared = self.paused
        if self.paused:  # otherwise tokens are on their way, and stay mixed
            for request, tokens in self.running.items():
                if tokens.spans[-1][1] == MIXED:
                    tokens.begin(self.epoch, self.count(request))

    def resume(self) -> None:
        """Note that steps run."""
        self.paused = self.cleared = False

    def salt(self, given: str | None) -> str | None:
        """Return the salt of a request's cached prefixes, which no other epoch shares. given: the user's salt."""
        if self.epoch == 0:
            return given
        return f"alignkit epoch {self.epoch}" + (f", {given}" if given else "")

    def add(self, request: str) -> None:
        """Count a request that is sent to the engine."""
        self.running[request] = Tokens([(0, self.epoch)])

    def arrived(self, outputs: Iterable) -> None:
        """Note the requests that have finished. This runs in every step; it takes nanoseconds per request.

        outputs: vLLM's `EngineCoreOutput` objects, in the order in which the engine sent them, relative to changes.
        """
        for each in [output for output in outputs if output.finish_reason is not None]:
            tokens = self.running.pop(each.request_id, None)
            if tokens is not None:
                self.finished[each.request_id] = tokens

    def forget(self, requests: Iterable[str]) -> None:
        """Drop requests that were aborted."""
        for request in requests:
            self.running.pop(request, None)
            self.finished.pop(request, None)

    def of_request(self, request: str) -> Tokens | None:
        """Return the tokens of a request that has finished or runs, or None if this engine does not have it."""
        return self.finished.get(request) or self.running.get(request)


def token_epochs(output) -> dict[int, list[int]]:
    """Return the epoch of each sampled token of a finished request.

    An epoch is the number of changes of the engine's weights before the token was computed. The epoch -1 marks tokens
    whose KV cache has entries of several epochs (docs/identity.md).

    Args:
        output: A finished `vllm.RequestOutput`, the last one of a stream. The tokens of its completions must be all
            tokens of the request, as `RequestOutputKind.FINAL_ONLY` and `CUMULATIVE` give them.

    Returns:
        The epochs by the index of the completion.

    Raises:
        InputError: The request has not finished, or comes from an engine that is not aligned; or `output` has other
            tokens than the request, as with `RequestOutputKind.DELTA`.
    """
    given = (output.kv_transfer_params or {}).get(KEY)
    if given is None:
        raise InputError("output: must be a finished output of an aligned engine, got one without epochs")
    found = {}
    for completion in output.outputs:
        index, got = str(completion.index), len(completion.token_ids)
        if got != given["tokens"][index]:
            raise InputError(
                f"output: must have all {given['tokens'][index]} tokens of completion {index}, as with "
                f"RequestOutputKind.FINAL_ONLY or CUMULATIVE, got {got}"
            )
        found[completion.index] = Tokens(given["epochs"][index]).epochs(got)
    return found


_ENGINES: weakref.WeakValueDictionary[int, Epochs] = weakref.WeakValueDictionary()
"""Engines whose front end or worker runs in this process, by the id of their configuration. They own the values."""


def started(config) -> Epochs:
    """Return the epochs of a new engine. config: its `VllmConfig`; an earlier one may have had the same id."""
    _ENGINES[id(config)] = epochs = Epochs()
    return epochs


def of(config) -> Epochs:
    """Return the epochs of an engine in this process. config: its `VllmConfig`."""
    return _ENGINES.get(id(config)) or started(config)


def holder(request: str) -> tuple[Epochs, Tokens] | None:
    """Take a finished request: return its engine and tokens, or None if no engine or several have it."""
    found = [(engine, tokens) for engine in _ENGINES.values() if (tokens := engine.of_request(request))]
    if len(found) != 1:
        return None
    found[0][0].finished.pop(request, None)
    return found[0]
