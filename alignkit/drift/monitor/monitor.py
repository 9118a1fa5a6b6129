"""`Monitor`: per-step drift monitoring of a training loop. docs/monitor.md documents it and the contents of its files.

`names` computes the metrics, `records` and `replay` write the files, and `sinks` forward the metrics to loggers.
`Monitor.log` builds the record of a call, which `alignkit watch` and users' programs read. `_write_replay` builds the
`info` of a replay, which `load_replay` and `alignkit bisect --tokens` read. A renamed or removed key, or another type,
needs another `records.VERSION` or `replay.FORMAT_VERSION`; a new key does not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError

from ...errors import DriftError, InputError
from ...identity import Identity
from ...runtime.families import on_host
from ...runtime.ids import contract_id
from ..compare import DriftReport, Identities, Temperatures, checked_pair, compare_tensors, finite_or_none, sides_of
from . import sinks as _sinks
from .names import NAMES
from .records import MAX_RANK, VERSION, Appender, records_name, replay_name, token_json
from .replay import CONTEXT_NAME, MAX_CONTEXT, Replay, Weights, save_replay, weights_digest

MAX_WORST = 100
"""Maximum of `keep_worst`; docs/monitor.md states it. Such a record must be shorter than `records.MAX_LINE`."""
_MAX_META = 2**16
"""Maximum length of `meta` as JSON, in characters: a replay's header holds it, which `replay._MAX_HEADER` limits."""


class Monitor:
    """Drift monitor of a training loop: records every step and raises an alarm when an aligned run drifts.

        monitor = Monitor("drift", names="verl", contract=alignkit.megatron.status(model)["contract"])
        for step in ...:
            metrics = monitor.log(step, rollout_log_probs, old_log_probs, response_mask, tokens=responses)

    Use it as a context manager, or call `close`, to release the record file.

    Args:
        directory: Output directory, created if missing. Each rank appends one JSON object per call to
            ``monitor-rankNNNNN.jsonl``.
        contract: Contract id reported by the engines, such as ``alignkit.megatron.status(model)["contract"]``, or the
            pair of rollout's and training's ids, which must be equal. ``"stock"`` for unpatched engines disables the
            alarm.
        names: Metric set: "plain", "verl" or "nemo-rl" (docs/monitor.md).
        on_difference: Alarm of an aligned run, for every call with a token that is not bit-equal or not finite:
            "raise" a DriftError, "warn" with a RuntimeWarning, call a function with the DriftError, or None for no
            alarm. The first alarm of a Monitor also writes a replay file (`load_replay`), before the error is raised.
        keep_worst: Number of worst tokens in each record, in [0, 100].
        rank: Index in the names of this process's files (NNNNN), in [0, 99999]. Default: the torch.distributed rank, or
            0 without torch.distributed.
        sinks: Additional receivers of the metrics: "tensorboard" (event files in `directory`), "wandb" (the active
            run, if any), or functions of step and metrics. Default: TensorBoard if installed, and W&B if the loop
            imported it.
        meta: Text for people that is stored in the replay, such as the model path or the temperature.

    Raises:
        InputError: An argument is invalid, or another Monitor holds this rank's record file. Names the argument.
        UnsupportedError: `sinks` names "tensorboard" and TensorBoard cannot be imported.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        contract: str | tuple[str, str],
        names: str = "plain",
        on_difference: str | Callable[[DriftError], None] | None = "raise",
        keep_worst: int = 10,
        rank: int | None = None,
        sinks: Iterable[str | _sinks.Sink] | None = None,
        meta: Mapping[str, str] | None = None,
    ) -> None:
        if names not in NAMES:
            raise InputError(f"names: expected one of {', '.join(map(repr, NAMES))}, got {names!r:.80}")
        if not (on_difference in ("raise", "warn", None) or callable(on_difference)):
            raise InputError(f"on_difference: expected 'raise', 'warn', a function or None, got {on_difference!r:.80}")
        if type(keep_worst) is not int or not 0 <= keep_worst <= MAX_WORST:
            raise InputError(f"keep_worst: expected an int in [0, {MAX_WORST}], got {keep_worst!r:.80}")
        if rank is None:
            distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank = torch.distributed.get_rank() if distributed else 0
        if type(rank) is not int or not 0 <= rank <= MAX_RANK:
            raise InputError(f"rank: expected an int in [0, {MAX_RANK}], got {rank!r:.80}")
        meta = dict(meta or {})
        for key, value in meta.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise InputError(f"meta: keys and values must be strings, got {key!r:.80}: {value!r:.80}")
        if len(json.dumps(meta)) > _MAX_META:
            raise InputError(f"meta: must have at most {_MAX_META} characters as JSON, got {len(json.dumps(meta))}")
        self.contract = _one_contract(contract)
        self.rank = rank
        self.directory = Path(directory)
        self._metrics = NAMES[names]
        self._on_difference = on_difference if self.contract != "stock" else None
        self._keep_worst = keep_worst
        self._meta = meta
        self._replay: Path | None = None
        self._alarms = 0
        self.directory.mkdir(parents=True, exist_ok=True)
        self._sinks = _sinks.make_sinks(sinks, self.directory, rank)
        self._records: Appender | None = Appender(self.directory / records_name(rank))

    def log(
        self,
        step: int,
        rollout_logp: torch.Tensor,
        train_logp: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        tokens: torch.Tensor | None = None,
        context: Mapping[str, torch.Tensor] | None = None,
        weights: Weights | None = None,
        identity: Identities | None = None,
        epochs: torch.Tensor | None = None,
        temperature: Temperatures | None = None,
    ) -> dict[str, float]:
        """Compare one batch, write a record and return the metrics.

        Before the first alarm, the only GPU synchronization is the copy of `rollout_logp`, `train_logp`, `mask` and
        `epochs` to the CPU, plus the copy of `tokens` at steps that differ.

        Args:
            step: Training step, in [0, 2^63); several calls may share a step.
            rollout_logp: Logprobs of the rollout engine (natural logarithm), ``[B, S]``, fp32 or bf16, on any device.
            train_logp: Logprobs of the training engine, same shape and dtype as `rollout_logp`, on any device.
            mask: ``[B, S]``, bool or 0/1; true where the position is a sampled token. None selects every position.
            tokens: ``[B, S]``, int64 or int32: the token id of each logprob. Stored in records and in a replay.
            context: Other tensors by name that a replay needs, such as the prompts; read only to write a replay.
            weights: Weights that computed the logprobs (see `weights_digest`); read only to write a replay.
            identity: Identities of rollout and training; None for an unknown one. Different weights raise no alarm
                while the bits are equal; the record states both digests.
            epochs: ``[B, S]``, int64 or int32, on any device: the epoch of the weights that computed each rollout
                token, or -1 if its KV cache has entries of several epochs. Values that the mask does not select are
                ignored.
            temperature: Temperatures of rollout and training, positive and finite in fp32; None for an unknown one.

        Returns:
            ``{name: value}`` under the names chosen by the Monitor's `names`.

        Raises:
            InputError: The Monitor is closed, an argument is invalid, or an identity or a GPU tensor's device has
                another contract. Names the argument.
            DriftError: A token is not bit-equal or not finite in an aligned run, and `on_difference` is "raise".
        """
        if self._records is None:
            raise InputError("log: must be called before close, but this Monitor is closed. Create a new Monitor.")
        if type(step) is not int or not 0 <= step < 2**63:
            raise InputError(f"step: expected an int in [0, 2^63), got {step!r:.80}")
        self._check(rollout_logp, train_logp, mask, tokens, context)
        rollout, training = rollout_logp.detach().cpu(), train_logp.detach().cpu()
        keep = None if mask is None else mask.detach().cpu()
        epochs = epochs.detach().cpu() if isinstance(epochs, torch.Tensor) else epochs  # read twice below
        identity = self._identities(identity)
        report = compare_tensors(
            rollout, training, keep, worst=self._keep_worst, identity=identity, epochs=epochs, temperature=temperature
        )
        report = _with_ids(report, tokens)
        keep = torch.ones_like(rollout, dtype=torch.bool) if keep is None else keep.bool()
        sides = sides_of(identity, epochs, temperature, keep)
        counted = sides.counted_epochs()
        facts = {
            "sides": sides.to_json(),
            "epochs": None if counted is None else counted.to_json(),
            "identity": list(report.identity),
            "causes": list(report.causes),
        }
        metrics = self._metrics(report, rollout, training, keep)
        alarm = self._on_difference is not None and not report.all_equal
        problem = None
        if alarm:
            if not self._alarms:
                problem = self._write_replay(
                    step, report, Replay(rollout, training, keep, tokens, dict(context or {})), weights, facts
                )
            self._alarms += 1
        first = report.first_difference
        self._records.append(
            {
                "version": VERSION,
                "step": step,
                "rank": self.rank,
                "time": time.time(),
                "contract": self.contract,
                "drift": report.metrics(""),
                "metrics": metrics,
                "first_difference": None if first is None else token_json(first),
                "worst": [token_json(token) for token in report.worst],
                "replay": self._replay.name if alarm and self._replay else None,
                **facts,
            }
        )
        for sink in self._sinks:
            sink(step, dict(metrics))
        if alarm:
            self._alarm(step, report, problem)
        return metrics

    def close(self) -> None:
        """Release the record file; a second call does nothing."""
        if self._records is not None:
            self._records.close()
            self._records = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _check(self, rollout_logp, train_logp, mask, tokens, context) -> None:
        """Validate the arguments that `compare_tensors` does not, before any copy or computation."""
        for name, x in (("rollout_logp", rollout_logp), ("train_logp", train_logp), ("mask", mask), ("tokens", tokens)):
            optional = name in ("mask", "tokens")
            if not isinstance(x, torch.Tensor) and not (optional and x is None):
                raise InputError(f"{name}: expected a tensor{' or None' if optional else ''}, got {type(x).__name__}")
        if tokens is not None and tokens.dtype not in (torch.int64, torch.int32):
            raise InputError(f"tokens: expected torch.int64 or torch.int32, got {tokens.dtype}")
        if tokens is not None and tokens.shape != train_logp.shape:
            raise InputError(f"tokens: expected train_logp's shape {list(train_logp.shape)}, got {list(tokens.shape)}")
        if context is not None and len(context) > MAX_CONTEXT:
            raise InputError(f"context: must have at most {MAX_CONTEXT} tensors, got {len(context)}")
        for name, x in (context or {}).items():
            if not (isinstance(name, str) and CONTEXT_NAME.fullmatch(name)):
                raise InputError(f"context: names must have 1 to 100 letters, digits or _, got {name!r:.120}")
            if not isinstance(x, torch.Tensor):
                raise InputError(f"context: {name}: expected a tensor, got {type(x).__name__}")
        # CPU tensors may have been computed on any device; a GPU tensor must match its own device's contract.
        for name, x in (("rollout_logp", rollout_logp), ("train_logp", train_logp)):
            if self.contract != "stock" and not on_host(x.device) and self.contract != contract_id(x.device):
                raise InputError(
                    f"contract: {name} is on {x.device}, so contract must be {contract_id(x.device)!r} or 'stock', "
                    f"got {self.contract!r}"
                )

    def _identities(self, identity: Identities | None) -> Identities:
        """Return both identities, with the monitor's contract where one is unknown."""
        unknown = Identity(self.contract)
        if identity is None:
            return unknown, unknown
        for one in checked_pair("identity", identity):
            if isinstance(one, Identity) and self.contract not in ("stock", one.contract):
                raise InputError(
                    f"identity: must have the monitor's contract {self.contract!r}, got {one.contract!r}. Create the "
                    "Monitor with contract='stock' to compare engines of different contracts."
                )
        rollout, training = (unknown if one is None else one for one in identity)
        return rollout, training

    def _write_replay(
        self, step: int, report: DriftReport, replay: Replay, weights: Weights | None, facts: dict
    ) -> str | None:
        """Write the replay file; return an error message for the alarm if it cannot be written."""
        from ...runtime.machine import machine

        assert report.first_difference is not None  # an alarm implies a difference
        digest = None
        if weights is not None:
            try:
                digest = weights_digest(weights)
            except Exception as e:  # the caller's weights may raise anything; the batch is still saved
                digest = {"error": f"{type(e).__name__}: {e}"[:1000]}
        if replay.tokens is not None:
            replay.tokens = replay.tokens.detach().cpu().long()
        replay.info = finite_or_none(
            {
                "step": step,
                "rank": self.rank,
                "time": time.time(),
                "contract": self.contract,
                "first_difference": token_json(report.first_difference),
                "differing": report.tokens - report.bit_equal,
                "machine": machine(),
                "weights": digest,
                "meta": self._meta,
                **facts,
            }
        )
        path = self.directory / replay_name(self.rank, step)
        try:
            save_replay(path, replay)
        except (OSError, SafetensorError) as e:
            return f"the replay could not be written: {e}"
        self._replay = path
        return None

    def _alarm(self, step: int, report: DriftReport, problem: str | None) -> None:
        replay = problem or (
            "no replay was written"
            if self._replay is None
            else f"the first difference can be replayed from {self._replay}"
        )
        error = DriftError(
            f"step {step}, rank {self.rank}: {report.tokens - report.bit_equal} of {report.tokens} logprobs are not "
            f"bit-equal under contract {self.contract}; {'causes' if len(report.causes) > 1 else 'cause'}: "
            f"{'; '.join(report.causes)}; first: {report.first_difference}; {replay}",
            step=step,
            rank=self.rank,
            token=report.first_difference,
            replay=self._replay,
        )
        if self._on_difference == "raise":
            raise error
        if self._on_difference == "warn":
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)
        elif callable(self._on_difference):
            self._on_difference(error)


def _one_contract(contract: str | tuple[str, str]) -> str:
    ids = (contract,) if isinstance(contract, str) else contract
    if (
        not isinstance(ids, (tuple, list))
        or len(ids) not in (1, 2)
        or not all(
            isinstance(x, str)
            and (x == "stock" or x.startswith("alignkit-"))
            and len(x) <= 200
            and x.isascii()
            and x.isprintable()
            for x in ids
        )
    ):
        raise InputError(
            "contract: expected 'stock', a contract id ('alignkit-...', at most 200 printable ASCII characters), or a "
            f"pair of contract ids (rollout, training), got {contract!r:.220}"
        )
    if len(set(ids)) > 1:
        raise InputError(
            f"contract: rollout and training must have the same contract id, got {ids[0]!r} and {ids[-1]!r}"
        )
    return ids[0]


def _with_ids(report: DriftReport, tokens: torch.Tensor | None) -> DriftReport:
    if tokens is None or report.first_difference is None:
        return report
    ids = tokens.detach().cpu()

    def with_id(token):
        return dataclasses.replace(token, token_id=int(ids[token.sequence, token.position]))

    return dataclasses.replace(
        report, first_difference=with_id(report.first_difference), worst=tuple(map(with_id, report.worst))
    )
