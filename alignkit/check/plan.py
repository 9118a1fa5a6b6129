"""Plan of a check: the rows of its table, and the engine jobs that compute them. Each job runs in its own process.

Names of rollouts and trainings (see `Row`) are stored in check.json and benchmarks/results. `alignkit check --training`
takes the names of trainings, and its help lists the rollouts. `rollout` and `train` document the fields of a job.
docs/drift.md states prompt lengths and chunk size. They are test inputs: after a change of them, new rows are not
comparable with stored rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ..errors import InputError
from ..jobs.job import Job

ROLLOUT, TRAINING = "alignkit.jobs.rollout", "alignkit.jobs.train"
"""Modules that rollout and training jobs run."""
PROMPT_LENGTHS = (3, 17, 64, 65, 129, 190, 256, 300)
"""Lengths below, at and above multiples of a chunk; the long prompts fill prefix-cache blocks."""
CHUNK = 64
"""Largest number of tokens per step of a `chunked` rollout."""
MIXTURE = "qwen3_moe"
"""Family of the MoE model in `mixture_rows`."""
_KINDS = ("chunked", "eager", "v1", "ep", "routed", "ep-routed")
"""Rollouts that sample the batch with a separate engine."""
_TRAINING = re.compile(r"tp\d+(-sp)?(-ep\d+)?(-te)?(-pp\d+)?(-cp\d+)?-(one|padded|packed)")


@dataclass(frozen=True)
class Row:
    """One row of check.json: a rollout compared with a training.

    rollout: ``batch``, ``one``, ``prefix``, ``prompt_logprobs``, ``chunked``, ``eager`` or ``v1``. On several ranks
    ``tp2`` is the batch, and ``tp2-one``, ``tp2-eager``, ... are the others. ``-ep``: each rank has whole experts.
    ``dp2``, ``dp2-ep``, ``tp2-dp2-ep``, ...: two replicas (vLLM's data parallelism), which share experts with ``-ep``.
    ``routed``, ``tp2-routed``, ``tp2-ep-routed``: the batch with router scores saved, on GPUs too.

    training: ``tp1``, ``tp2``, ``tp2-sp`` (sequence parallelism), ``tp1-ep2``, ``tp2-sp-ep2`` (expert parallelism), ...
    Then optionally, in this order, ``-te`` (TransformerEngine's layer spec), ``-pp2`` (pipeline stages) and ``-cp2``
    (context parallelism). Last ``-one``, ``-padded`` or ``-packed``.

    model: family of an additional model; "" for the check's main model.
    """

    dtype: str
    rollout: str
    training: str
    patched: bool
    model: str = ""

    def __str__(self) -> str:
        prefix = f"{self.model} " if self.model else ""
        return f"{prefix}{self.dtype} {_state(self.patched)}: {self.rollout} against {self.training}"

    @property
    def name_prefix(self) -> str:
        """Prefix of the names of the row's engines and files."""
        prefix = f"{self.model}-" if self.model else ""
        return f"{prefix}{self.dtype}-{_state(self.patched)}"

    @property
    def rollout_tp(self) -> int:
        return _rollout(self.rollout).tp

    @property
    def rollout_dp(self) -> int:
        """Number of data-parallel replicas of the rollout."""
        return _rollout(self.rollout).dp

    @property
    def rollout_ep(self) -> bool:
        """True if each rank of the rollout has whole experts."""
        return _rollout(self.rollout).kind.startswith("ep")

    @property
    def training_tp(self) -> int:
        return int(self.training.split("-")[0].removeprefix("tp"))

    @property
    def training_ep(self) -> int:
        """Expert-parallel size of the training."""
        return self._size("ep")

    @property
    def training_pp(self) -> int:
        """Pipeline-parallel size of the training."""
        return self._size("pp")

    @property
    def training_cp(self) -> int:
        """Context-parallel size of the training."""
        return self._size("cp")

    @property
    def spec(self) -> str:
        """Layer spec of the training, as in a job."""
        return "te" if "-te-" in self.training else "local"

    @property
    def layout(self) -> dict[str, int | str]:
        """Parallel sizes and layer spec of the training, as in a job."""
        return {
            "tp": self.training_tp,
            "ep": self.training_ep,
            "pp": self.training_pp,
            "cp": self.training_cp,
            "spec": self.spec,
        }

    def _size(self, kind: str) -> int:
        match = re.search(rf"-{kind}(\d+)-", self.training)
        return 1 if match is None else int(match[1])

    @property
    def sequence_parallel(self) -> bool:
        return "-sp-" in self.training


def rollouts(tp: int, gpu: bool = False, experts: bool = False) -> list[str]:
    """Return the names of the rollouts up to tensor-parallel size `tp`.

    vLLM compiles and captures CUDA graphs in all GPU rollouts but `eager`. All CPU rollouts are eager.
    """
    return (
        ["batch", "one", "chunked", "prefix", "prompt_logprobs"]
        + (["eager"] if gpu else [])
        + ([f"tp{tp}"] if tp > 1 else [])
        + ([f"tp{tp}-ep", f"dp{tp}-ep"] if tp > 1 and experts else [])
    )


def trainings(tp: int, experts: bool = False) -> list[str]:
    """Return the names of the trainings up to tensor-parallel size `tp`, and expert-parallel size `tp` with experts."""
    engines = ["tp1"] + ([f"tp{tp}", f"tp{tp}-sp"] if tp > 1 else [])
    engines += [f"tp1-ep{tp}", f"tp{tp}-sp-ep{tp}"] if tp > 1 and experts else []
    return [f"{engine}-{mode}" for engine in engines for mode in ("one", "padded")]


def rows(dtypes: list[str], tp: int, full: bool, gpu: bool = False, experts: bool = False) -> list[Row]:
    """Return the rows of the table, stock rows first.

    full: every pair of rollout and training. Otherwise the first dtype has every rollout against one training and one
    rollout against every training, and each other dtype has two pairs.
    """
    pairs = []
    for dtype in dtypes:
        if full:
            chosen = [(r, t) for r in rollouts(tp, gpu, experts) for t in trainings(tp, experts)]
        elif dtype == dtypes[0]:
            chosen = [(r, "tp1-padded") for r in rollouts(tp, gpu, experts)]
            chosen += [("batch", t) for t in trainings(tp, experts) if t != "tp1-padded"]
        else:
            chosen = [("batch", "tp1-padded"), ("one", "tp1-one")]
        pairs += [(dtype, *pair) for pair in chosen]
    return [
        Row(dtype, rollout, training, patched)
        for patched in (False, True)
        for dtype, rollout, training in pairs
        # Stock vLLM's CPU workers crash with an illegal instruction if they share experts.
        if patched or gpu or not experts or _rollout(rollout).ranks == 1
    ]


def mixture_rows(dtype: str) -> list[Row]:
    """Return the MoE rows that accompany a dense model; mode "one" is omitted because it is the slowest."""
    pairs = (("batch", "tp1-padded"), ("prompt_logprobs", "tp1-one"))
    return [Row(dtype, *pair, patched, MIXTURE) for patched in (False, True) for pair in pairs]


def against_batch(dtypes: list[str], trainings: list[str]) -> list[Row]:
    """Return the rows that compare each training with a batch, with stock rows if stock Megatron supports the training.

    Raises InputError for an invalid training name.
    """
    for name in trainings:
        if not _TRAINING.fullmatch(name):
            raise InputError(
                "training: expected the form tpN[-sp][-epN][-te][-ppN][-cpN]-(one|padded|packed), such as "
                f"tp2-sp-padded, got {name!r:.100}"
            )
    rows = [Row(d, "batch", t, patched) for patched in (False, True) for d in dtypes for t in dict.fromkeys(trainings)]
    return [
        row
        for row in rows
        if row.patched or (row.training_cp == 1 and (row.spec == "te" or not row.training.endswith("-packed")))
    ]


def rollout_file(out: Path, row: Row) -> Path:
    return out / "logprobs" / f"{row.name_prefix}-rollout-{row.rollout}.safetensors"


def training_file(out: Path, row: Row) -> Path:
    return out / "logprobs" / f"{row.name_prefix}-training-{row.training}-of-{row.rollout}.safetensors"


def routed(row: Row, gpu: bool) -> bool:
    """Return True if an MoE model's expert choices are saved on both sides of this row."""
    rollout = _rollout(row.rollout)
    return (
        _records_routing(rollout, gpu)
        and _computes_all_tokens(rollout.mode)
        and row.training_pp == row.training_cp == 1
    )


def _records_routing(rollout: _Rollout, gpu: bool) -> bool:
    """Return True for an engine whose routers can be recorded: eager, V1 model runner, one replica."""
    return rollout.dp == 1 and (not gpu or "routed" in rollout.kind)


def _computes_all_tokens(mode: str) -> bool:
    """Return False for runs that take tokens from the prefix cache."""
    return mode != "prefix"


def jobs(
    wanted: list[Row],
    out: Path,
    models: dict[str, Path],
    prompts: list[list[int]],
    *,
    max_tokens: int,
    temperature: float,
    seed: int,
    gpu: bool = False,
    chunk: int = CHUNK,
    micro_batch: int | None = None,
    prefix: str = "",
    experts: bool = False,
) -> list[Job]:
    """Return the engine jobs of `wanted`, rows of one model: rollouts first, then by descending number of ranks.

    models: HF directory by dtype. chunk: largest number of tokens per step of a ``chunked`` rollout. micro_batch:
    maximum tokens of a training micro-batch, padding included; None for a single micro-batch. prefix: prefix of the
    jobs' names. experts: the models are MoE; expert choices are saved, on GPUs for the ``routed`` rollouts only.
    """
    rollout_jobs: list[Job] = []
    training_jobs: list[Job] = []
    for dtype, patched in dict.fromkeys((row.dtype, row.patched) for row in wanted):
        selected = [row for row in wanted if (row.dtype, row.patched) == (dtype, patched)]
        common = {"model": str(models[dtype]), "dtype": dtype, "patched": patched}
        name = f"{prefix}{selected[0].name_prefix}"

        engines: dict[str, dict[str, str]] = {}
        for rollout_name in dict.fromkeys(row.rollout for row in selected):
            rollout = _rollout(rollout_name)
            runs = engines.setdefault(rollout.engine, {})
            if rollout.mode == "prompt_logprobs":  # evaluates the tokens sampled by the batch
                runs.setdefault("batch", str(rollout_file(out, replace(selected[0], rollout=rollout.batch))))
            runs[rollout.mode] = str(rollout_file(out, replace(selected[0], rollout=rollout_name)))
        for engine, runs in engines.items():
            rollout = _rollout(engine)
            kind, routing = rollout.kind, experts and _records_routing(rollout, gpu)
            spec = common | {
                "tp": rollout.tp,
                "dp": rollout.dp,
                "expert_parallel": kind.startswith("ep"),
                "eager": not gpu or kind == "eager",
                "runner": "v2" if gpu and kind != "v1" else "v1",
                "max_num_batched_tokens": chunk if kind == "chunked" else None,
                "runs": [
                    {"mode": mode, "out": path} | ({"routing": True} if routing and _computes_all_tokens(mode) else {})
                    for mode, path in runs.items()
                ],
                "prompts": prompts,
                "max_tokens": max_tokens,
                "temperature": temperature,
                "seed": seed,
                "tokens_from": runs["batch"] if "prompt_logprobs" in runs else None,
            }
            if routing:
                spec |= {"eager": True, "runner": "v1"}
            rollout_jobs.append(Job(f"{name}-rollout-{engine}", ROLLOUT, spec))

        for engine in dict.fromkeys(row.training.rpartition("-")[0] for row in selected):
            engine_rows = [row for row in selected if row.training.rpartition("-")[0] == engine]
            runs = [
                {
                    "mode": row.training.rpartition("-")[2],
                    "in": str(rollout_file(out, row)),
                    "out": str(training_file(out, row)),
                }
                | ({"routing": True} if experts and routed(row, gpu) else {})
                for row in engine_rows
            ]
            spec = common | {
                **engine_rows[0].layout,
                "sequence_parallel": engine_rows[0].sequence_parallel,
                "micro_batch": micro_batch,
                "runs": runs,
            }
            training_jobs.append(
                Job(
                    f"{name}-training-{engine}",
                    TRAINING,
                    spec,
                    needs=list(dict.fromkeys(rollout_file(out, row) for row in engine_rows)),
                )
            )
    return [job for group in (rollout_jobs, training_jobs) for job in sorted(group, key=lambda job: -job.slots)]


def _state(patched: bool) -> str:
    return "patched" if patched else "stock"


class _Rollout(NamedTuple):
    """Parsed name of a rollout; kind is from `_KINDS` or "", mode is that of the run."""

    tp: int
    dp: int
    kind: str
    mode: str

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def engine(self) -> str:
        replicas = f"-dp{self.dp}" if self.dp > 1 else ""
        return f"tp{self.tp}{replicas}" + (f"-{self.kind}" if self.kind else "")

    @property
    def batch(self) -> str:
        """Name of the batch rollout on the same number of ranks."""
        return "-".join(f"{kind}{n}" for kind, n in (("tp", self.tp), ("dp", self.dp)) if n > 1) or "batch"


def _rollout(name: str) -> _Rollout:
    tp, dp, rest = re.fullmatch(r"(?:tp(\d+)(?:-|$))?(?:dp(\d+)(?:-|$))?(.*)", name).groups()
    kind = rest if rest in _KINDS else ""
    return _Rollout(int(tp or 1), int(dp or 1), kind, "batch" if kind or not rest else rest)
