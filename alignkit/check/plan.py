"""What a check runs: the rows of its table, and the engines (one process each) that they need."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import InputError

ROLLOUT, TRAINING = "alignkit.check.rollout", "alignkit.check.train"
"""What a job of either kind runs."""
DTYPES = ("bfloat16", "float32")
PROMPT_LENGTHS = (3, 17, 64, 65, 129, 190, 256, 300)
"""Shorter and longer than a chunk, and on its borders; the long ones fill cached blocks."""
CHUNK = 64
MIXTURE = "qwen3_moe"
"""Family of the mixture of experts of `mixture_rows`."""
_KINDS = ("chunked", "eager", "v1", "ep", "routed", "ep-routed")
"""Rollouts whose batch is sampled by an engine of their own."""
_TRAINING = re.compile(r"tp\d+(-sp)?(-ep\d+)?(-te)?(-pp\d+)?(-cp\d+)?-(one|padded|packed)")


@dataclass(frozen=True)
class Row:
    """One line of check.json: which rollout is compared with which training.

    rollout: ``batch``, ``one``, ``prefix``, ``prompt_logprobs``, ``chunked``, ``eager`` or ``v1``; on more than
    one rank ``tp2`` for a batch and ``tp2-one``, ``tp2-eager``, ... for the others; ``tp2-ep``: each rank has whole experts.
    ``dp2``, ``dp2-ep``, ``tp2-dp2-ep``, ...: of two replicas of so many ranks (vLLM's data parallelism), which share experts.
    ``routed``, ``tp2-routed``, ``tp2-ep-routed``: as the batch, and on a GPU too the choices of the routers are saved.
    training: ``tp1``, ``tp2``, ``tp2-sp`` (sequence parallelism), ``tp1-ep2`` and ``tp2-sp-ep2`` (expert parallelism), ..., then
    of ``-te`` (TransformerEngine's layer spec), ``-pp2`` (pipeline stages) and ``-cp2`` (context parallelism) what there is, in
    this order, then ``-one``, ``-padded`` or ``-packed``.
    model: family of a model beside the one that the check is of; "": of that one.
    """

    dtype: str
    rollout: str
    training: str
    patched: bool
    model: str = ""

    def __str__(self) -> str:
        of = f"{self.model} " if self.model else ""
        return f"{of}{self.dtype} {_state(self.patched)}: {self.rollout} against {self.training}"

    @property
    def named(self) -> str:
        """How names of its engines and files begin."""
        of = f"{self.model}-" if self.model else ""
        return f"{of}{self.dtype}-{_state(self.patched)}"

    @property
    def rollout_tp(self) -> int:
        return _rollout(self.rollout).tp

    @property
    def rollout_dp(self) -> int:
        """Replicas of the rollout."""
        return _rollout(self.rollout).dp

    @property
    def rollout_ep(self) -> bool:
        """Whether each rank of the rollout has whole experts."""
        return _rollout(self.rollout).kind.startswith("ep")

    @property
    def training_tp(self) -> int:
        return int(self.training.split("-")[0].removeprefix("tp"))

    @property
    def training_ep(self) -> int:
        """Expert-parallel ranks of the training."""
        return self._size("ep")

    @property
    def training_pp(self) -> int:
        """Pipeline stages of the training."""
        return self._size("pp")

    @property
    def training_cp(self) -> int:
        """Ranks of the training that share each sequence."""
        return self._size("cp")

    @property
    def spec(self) -> str:
        """The layer spec of the training, as of a job."""
        return "te" if "-te-" in self.training else "local"

    @property
    def layout(self) -> dict[str, int | str]:
        """Of the training, as of a job."""
        return {
            "tp": self.training_tp,
            "ep": self.training_ep,
            "pp": self.training_pp,
            "cp": self.training_cp,
            "spec": self.spec,
        }

    def _size(self, of: str) -> int:
        found = re.search(rf"-{of}(\d+)-", self.training)
        return 1 if found is None else int(found[1])

    @property
    def sequence_parallel(self) -> bool:
        return "-sp-" in self.training


@dataclass(eq=False)
class Job:
    """One engine in one process: `python -m <module> <name>.json`."""

    name: str
    module: str
    spec: dict
    needs: list[Path] = field(default_factory=list)

    @property
    def slots(self) -> int:
        """Processes it computes in."""
        sizes = [self.spec.get(name, 1) for name in ("tp", "dp", "pp", "cp")]
        return max(math.prod(sizes), self.spec.get("ep", 1))

    @property
    def outputs(self) -> list[Path]:
        return [Path(run["out"]) for run in self.spec["runs"]]

    def leave_out(self, lost: set[Path]) -> None:
        """Drops the runs whose input is among `lost`."""
        self.spec["runs"] = [run for run in self.spec["runs"] if "in" not in run or Path(run["in"]) not in lost]


def rollouts(tp: int, gpu: bool = False, experts: bool = False) -> list[str]:
    """Names of the rollouts; tp: the largest tensor-parallel size. On a GPU vLLM compiles and captures CUDA
    graphs, and one rollout does neither; on a CPU none does."""
    return (
        ["batch", "one", "chunked", "prefix", "prompt_logprobs"]
        + (["eager"] if gpu else [])
        + ([f"tp{tp}"] if tp > 1 else [])
        + ([f"tp{tp}-ep", f"dp{tp}-ep"] if tp > 1 and experts else [])
    )


def trainings(tp: int, experts: bool = False) -> list[str]:
    """Names of the trainings; tp: the largest tensor-parallel size, and of a model with experts the expert-parallel one."""
    engines = ["tp1"] + ([f"tp{tp}", f"tp{tp}-sp"] if tp > 1 else [])
    engines += [f"tp1-ep{tp}", f"tp{tp}-sp-ep{tp}"] if tp > 1 and experts else []
    return [f"{engine}-{mode}" for engine in engines for mode in ("one", "padded")]


def rows(dtypes: list[str], tp: int, full: bool, gpu: bool = False, experts: bool = False) -> list[Row]:
    """The rows of the table. `full`: every pair. Otherwise each mechanism once: in the first dtype every
    rollout against one training and one rollout against every training, in the others two pairs."""
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
        # On the CPU stock vLLM's workers die of an illegal instruction where they share experts.
        if patched or gpu or not experts or _rollout(rollout).ranks == 1
    ]


def mixture_rows(dtype: str) -> list[Row]:
    """The few of a mixture of experts beside the rows of a dense model; not "one", which takes longer than all else."""
    pairs = (("batch", "tp1-padded"), ("prompt_logprobs", "tp1-one"))
    return [Row(dtype, *pair, patched, MIXTURE) for patched in (False, True) for pair in pairs]


def against_batch(dtypes: list[str], trainings: list[str]) -> list[Row]:
    """The rows of `trainings`, by name, each compared with a batch; stock where stock Megatron runs so.

    Raises InputError for what is no name of a training."""
    for name in trainings:
        if not _TRAINING.fullmatch(name):
            raise InputError(f"training: {name!r} is not of the form tp1[-sp][-ep2][-te][-pp2][-cp2]-one|padded|packed")
    rows = [Row(d, "batch", t, patched) for patched in (False, True) for d in dtypes for t in dict.fromkeys(trainings)]
    return [
        row
        for row in rows
        if row.patched or (row.training_cp == 1 and (row.spec == "te" or not row.training.endswith("-packed")))
    ]


def rollout_file(out: Path, row: Row) -> Path:
    return out / "logprobs" / f"{row.named}-rollout-{row.rollout}.safetensors"


def training_file(out: Path, row: Row) -> Path:
    return out / "logprobs" / f"{row.named}-training-{row.training}-of-{row.rollout}.safetensors"


def routed(row: Row, gpu: bool) -> bool:
    """Whether the choices of both sides' routers are saved, in a model that has any."""
    rollout = _rollout(row.rollout)
    return _watched(rollout, gpu) and _routed(rollout.mode) and row.training_pp == row.training_cp == 1


def _watched(rollout: _Rollout, gpu: bool) -> bool:
    """Whether an engine is one whose routers can be looked at: eager, of vLLM's V1 runner, and of one replica."""
    return rollout.dp == 1 and (not gpu or "routed" in rollout.kind)


def _routed(mode: str) -> bool:
    """Of a run; from a warm prefix cache not all tokens are computed."""
    return mode != "prefix"


def draw_prompts(vocab: int, seed: int, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    """Random token ids, a prompt of each of `lengths`; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]


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
    """The engines that `wanted`, rows of one model, needs, each once, rollouts first, those on more ranks before the others.

    models: HF directory by dtype. chunk: tokens in a chunk of a ``chunked`` prefill. micro_batch: tokens, with
    their padding, in a micro-batch of training, None for all at once. prefix: of the jobs' names. experts: of the models; the
    choices of their routers are saved, on a GPU of the rollouts ``routed``.
    """
    first: list[Job] = []
    second: list[Job] = []
    for dtype, patched in dict.fromkeys((row.dtype, row.patched) for row in wanted):
        mine = [row for row in wanted if (row.dtype, row.patched) == (dtype, patched)]
        common = {"model": str(models[dtype]), "dtype": dtype, "patched": patched}
        named = f"{prefix}{mine[0].named}"

        engines: dict[str, dict[str, str]] = {}
        for name in dict.fromkeys(row.rollout for row in mine):
            asked = _rollout(name)
            runs = engines.setdefault(asked.engine, {})
            if asked.mode == "prompt_logprobs":  # it evaluates the tokens sampled there
                runs.setdefault("batch", str(rollout_file(out, replace(mine[0], rollout=asked.batch))))
            runs[asked.mode] = str(rollout_file(out, replace(mine[0], rollout=name)))
        for engine, runs in engines.items():
            made = _rollout(engine)
            kind, watched = made.kind, experts and _watched(made, gpu)
            spec = common | {
                "tp": made.tp,
                "dp": made.dp,
                "expert_parallel": kind.startswith("ep"),
                "eager": not gpu or kind == "eager",
                "runner": "v2" if gpu and kind != "v1" else "v1",
                "max_num_batched_tokens": chunk if kind == "chunked" else None,
                "runs": [
                    {"mode": mode, "out": path} | ({"routing": True} if watched and _routed(mode) else {})
                    for mode, path in runs.items()
                ],
                "prompts": prompts,
                "max_tokens": max_tokens,
                "temperature": temperature,
                "seed": seed,
                "tokens_from": runs["batch"] if "prompt_logprobs" in runs else None,
            }
            if watched:
                spec |= {"eager": True, "runner": "v1"}
            first.append(Job(f"{named}-rollout-{engine}", ROLLOUT, spec))

        for engine in dict.fromkeys(row.training.rpartition("-")[0] for row in mine):
            of_engine = [row for row in mine if row.training.rpartition("-")[0] == engine]
            runs = [
                {
                    "mode": row.training.rpartition("-")[2],
                    "in": str(rollout_file(out, row)),
                    "out": str(training_file(out, row)),
                }
                | ({"routing": True} if experts and routed(row, gpu) else {})
                for row in of_engine
            ]
            spec = common | {
                **of_engine[0].layout,
                "sequence_parallel": of_engine[0].sequence_parallel,
                "micro_batch": micro_batch,
                "runs": runs,
            }
            second.append(
                Job(
                    f"{named}-training-{engine}",
                    TRAINING,
                    spec,
                    needs=list(dict.fromkeys(rollout_file(out, row) for row in of_engine)),
                )
            )
    return [job for half in (first, second) for job in sorted(half, key=lambda job: -job.slots)]


def write(job: Job, path: Path) -> None:
    path.write_text(json.dumps(job.spec, indent=1) + "\n")


def _state(patched: bool) -> str:
    return "patched" if patched else "stock"


class _Rollout(NamedTuple):
    """What a rollout's name says. kind: of engine, or ""; mode: of the run."""

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
        """The rollout of a batch on as many ranks."""
        return "-".join(f"{of}{n}" for of, n in (("tp", self.tp), ("dp", self.dp)) if n > 1) or "batch"


def _rollout(name: str) -> _Rollout:
    tp, dp, rest = re.fullmatch(r"(?:tp(\d+)(?:-|$))?(?:dp(\d+)(?:-|$))?(.*)", name).groups()
    kind = rest if rest in _KINDS else ""
    return _Rollout(int(tp or 1), int(dp or 1), kind, "batch" if kind or not rest else rest)
