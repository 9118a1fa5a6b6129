"""`Monitor`: what a training loop calls once a step."""

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

from ...contract import contract_id
from ...errors import DriftError, InputError
from ...runtime.families import on_host
from ..compare import DriftReport, compare_tensors, finite_or_none
from . import sinks as _sinks
from .names import NAMES
from .records import MAX_RANK, VERSION, Appender, records_name, replay_name, token_json
from .replay import CONTEXT_NAME, Replay, Weights, save_replay, weights_digest

MAX_WORST = 100
_MAX_META = 2**16


class Monitor:
    """Measures drift in a training loop, writes it down, and raises the alarm when an aligned run is not.

        monitor = Monitor("drift", names="verl", contract=alignkit.megatron.status(model)["contract"])
        for step in ...:
            metrics = monitor.log(step, rollout_log_probs, old_log_probs, response_mask, tokens=responses)

    directory: made if absent. Each rank appends to ``monitor-rankNNNNN.jsonl`` in it, a JSON object for each call.
    contract: as the engines name it, such as ``alignkit.megatron.status(model)["contract"]``, or the pair of rollout's
        and training's, which must be the same; ``"stock"`` for engines that are not aligned, whose differences are
        no alarm.
    names: "plain", "verl" or "nemo-rl": under which names metrics are computed and written (docs/monitor.md).
    on_difference: in an aligned run, at each call with a token that is not bit-equal or not finite: "raise" a
        DriftError, "warn" (RuntimeWarning), a function that is called with the DriftError, or None. The first one is
        preceded by a replay on disk (`load_replay`); there is one for each Monitor at most. With None there is none.
    keep_worst: how many of a call's worst tokens its record holds, at most 100.
    rank: which file is this process's; torch.distributed's rank by default, 0 without it.
    sinks: what else gets the metrics: "tensorboard" (event files in the directory), "wandb" (the active run, if there
        is one), functions of step and metrics. By default TensorBoard where it is installed, and W&B where the loop
        has imported it.
    meta: text for people, kept in the replay: the model's path, the temperature.

    Raises InputError naming the argument. Use it as a context manager, or `close` it, to let go of the file.
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
            raise InputError(f"names: {names!r:.80}, expected one of {', '.join(map(repr, NAMES))}")
        if not (on_difference in ("raise", "warn", None) or callable(on_difference)):
            raise InputError(f"on_difference: {on_difference!r:.80}, expected 'raise', 'warn', a function or None")
        if type(keep_worst) is not int or not 0 <= keep_worst <= MAX_WORST:
            raise InputError(f"keep_worst: {keep_worst!r:.80}, expected an int from 0 to {MAX_WORST}")
        if rank is None:
            distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank = torch.distributed.get_rank() if distributed else 0
        if type(rank) is not int or not 0 <= rank <= MAX_RANK:
            raise InputError(f"rank: {rank!r:.80}, expected an int from 0 to {MAX_RANK}")
        meta = dict(meta or {})
        if not all(isinstance(x, str) for pair in meta.items() for x in pair) or len(json.dumps(meta)) > _MAX_META:
            raise InputError(f"meta: expected strings, at most {_MAX_META} characters of them as JSON")
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
        self._sinks = _sinks.make(sinks, self.directory, rank)
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
    ) -> dict[str, float]:
        """Compares one batch, writes a record, and returns the metrics, ``{name: value}``.

        step: of the training, an int >= 0; several calls may have the same.
        rollout_logp, train_logp, mask: as in `compare_tensors`: ``[B, S]``, fp32 or bf16, natural logarithm.
        tokens: ``[B, S]``, integers: the id that each logprob is of. Named in records, kept in a replay.
        context: other tensors that a replay needs, by name, such as the prompts; only a replay reads them.
        weights: what the logprobs were computed with (see `weights_digest`); only a replay reads it.

        The three copies to the CPU that a comparison needs are all that waits for a GPU, and those of tokens where
        tokens differ. Raises InputError naming the argument, and DriftError for an alarm with "raise".
        """
        if self._records is None:
            raise InputError("log: this Monitor is closed")
        if type(step) is not int or not 0 <= step < 2**63:
            raise InputError(f"step: {step!r:.80}, expected an int >= 0")
        self._check(rollout_logp, train_logp, mask, tokens, context)
        rollout, training = rollout_logp.detach().cpu(), train_logp.detach().cpu()
        keep = None if mask is None else mask.detach().cpu()
        report = _with_ids(compare_tensors(rollout, training, keep, worst=self._keep_worst), tokens)
        keep = torch.ones(rollout.shape, dtype=torch.bool) if keep is None else keep.bool()
        metrics = self._metrics(report, rollout, training, keep)
        alarm = self._on_difference is not None and not report.all_equal
        problem = None
        if alarm:
            if not self._alarms:
                problem = self._write_replay(
                    step, report, Replay(rollout, training, keep, tokens, dict(context or {})), weights
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
            }
        )
        for sink in self._sinks:
            sink(step, dict(metrics))
        if alarm:
            self._alarm(step, report, problem)
        return metrics

    def close(self) -> None:
        """Lets go of the file; may be called twice."""
        if self._records is not None:
            self._records.close()
            self._records = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _check(self, rollout_logp, train_logp, mask, tokens, context) -> None:
        """What `compare_tensors` does not look at, before anything is copied or computed."""
        for name, x in (("rollout_logp", rollout_logp), ("train_logp", train_logp), ("mask", mask), ("tokens", tokens)):
            optional = name in ("mask", "tokens")
            if not isinstance(x, torch.Tensor) and not (optional and x is None):
                raise InputError(f"{name}: {type(x).__name__}, expected a tensor{' or None' if optional else ''}")
        if tokens is not None and (tokens.dtype not in (torch.int64, torch.int32) or tokens.shape != train_logp.shape):
            raise InputError(
                f"tokens: {tokens.dtype} of shape {list(tokens.shape)}, expected torch.int64 or "
                f"torch.int32 of train_logp's shape {list(train_logp.shape)}"
            )
        for name, x in (context or {}).items():
            if not (isinstance(name, str) and CONTEXT_NAME.fullmatch(name) and isinstance(x, torch.Tensor)):
                raise InputError(f"context: {name!r:.80}: expected names of letters, digits and _, and tensors")
        # A value on a CPU may have come from anywhere; one that lies elsewhere says who computed it.
        for name, x in (("rollout_logp", rollout_logp), ("train_logp", train_logp)):
            if self.contract != "stock" and not on_host(x.device) and self.contract != contract_id(x.device):
                raise InputError(
                    f"contract: {self.contract!r}, but {name} lies on {x.device}, whose contract is "
                    f"{contract_id(x.device)!r}"
                )

    def _write_replay(self, step: int, report: DriftReport, replay: Replay, weights: Weights | None) -> str | None:
        """What went wrong with it, or None: the alarm is raised all the same, and says so."""
        from ...check.machine import machine

        assert report.first_difference is not None  # what raises the alarm
        digest = None
        if weights is not None:
            try:
                digest = weights_digest(weights)
            except Exception as e:  # whatever a loop's own weights raise, the batch is worth keeping
                digest = {"error": f"{type(e).__name__}: {e}"}
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
        where = problem or (
            "no replay was written"
            if self._replay is None
            else f"the first difference can be replayed from {self._replay}"
        )
        error = DriftError(
            f"step {step}, rank {self.rank}: {report.tokens - report.bit_equal} of {report.tokens} logprobs are not "
            f"equal to the last bit under contract {self.contract}; the first is {report.first_difference}; {where}",
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
            f"contract: {contract!r:.200}, expected 'stock', an engine's contract id, or the pair of "
            "rollout's and training's"
        )
    if len(set(ids)) > 1:
        raise InputError(
            f"contract: rollout has {ids[0]!r}, training {ids[-1]!r}; bits of different contracts are not comparable"
        )
    return ids[0]


def _with_ids(report: DriftReport, tokens: torch.Tensor | None) -> DriftReport:
    if tokens is None or report.first_difference is None:
        return report
    ids = tokens.detach().cpu()

    def named(token):
        return dataclasses.replace(token, token_id=int(ids[token.sequence, token.position]))

    return dataclasses.replace(
        report, first_difference=named(report.first_difference), worst=tuple(map(named, report.worst))
    )
