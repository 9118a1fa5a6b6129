"""What a check runs: the rows of its table, and the engines (one process each) that they need."""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

DTYPES = ("bfloat16", "float32")
PROMPT_LENGTHS = (3, 17, 64, 65, 129, 190, 256, 300)
"""Shorter and longer than a chunk, and on its borders; the long ones fill cached blocks."""
CHUNK = 64


@dataclass(frozen=True)
class Row:
    """One line of check.json: which rollout is compared with which training."""

    dtype: str
    rollout: str
    training: str
    patched: bool

    def __str__(self) -> str:
        return f"{self.dtype} {_state(self.patched)}: {self.rollout} against {self.training}"


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
        return self.spec["tp"]

    @property
    def outputs(self) -> list[Path]:
        return [Path(run["out"]) for run in self.spec["runs"]]


def rollouts(tp: int) -> list[str]:
    """Names of the rollouts; tp: the largest tensor-parallel size."""
    return ["batch", "one", "chunked", "prefix", "prompt_logprobs"] + ([f"tp{tp}"] if tp > 1 else [])


def trainings(tp: int) -> list[str]:
    """Names of the trainings; tp: the largest tensor-parallel size."""
    engines = ["tp1"] + ([f"tp{tp}", f"tp{tp}-sp"] if tp > 1 else [])
    return [f"{engine}-{mode}" for engine in engines for mode in ("one", "padded")]


def rows(dtypes: list[str], tp: int, full: bool) -> list[Row]:
    """The rows of the table. `full`: every pair. Otherwise each mechanism once: in the first dtype every
    rollout against one training and one rollout against every training, in the others two pairs."""
    pairs = []
    for dtype in dtypes:
        if full:
            chosen = [(r, t) for r in rollouts(tp) for t in trainings(tp)]
        elif dtype == dtypes[0]:
            chosen = [(r, "tp1-padded") for r in rollouts(tp)]
            chosen += [("batch", t) for t in trainings(tp) if t != "tp1-padded"]
        else:
            chosen = [("batch", "tp1-padded"), ("one", "tp1-one")]
        pairs += [(dtype, *pair) for pair in chosen]
    return [Row(*pair, patched) for patched in (False, True) for pair in pairs]


def rollout_file(out: Path, row: Row) -> Path:
    return out / "logprobs" / f"{row.dtype}-{_state(row.patched)}-rollout-{row.rollout}.safetensors"


def training_file(out: Path, row: Row) -> Path:
    return out / "logprobs" / (f"{row.dtype}-{_state(row.patched)}-training-{row.training}"
                               f"-of-{row.rollout}.safetensors")


def draw_prompts(vocab: int, seed: int) -> list[list[int]]:
    """Random token ids of `PROMPT_LENGTHS`, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def jobs(wanted: list[Row], out: Path, models: dict[str, Path], prompts: list[list[int]], *, max_tokens: int,
         temperature: float, seed: int) -> list[Job]:
    """The engines that `wanted` needs, each once, rollouts first."""
    first: list[Job] = []
    second: list[Job] = []
    for dtype, patched in dict.fromkeys((row.dtype, row.patched) for row in wanted):
        mine = [row for row in wanted if (row.dtype, row.patched) == (dtype, patched)]
        common = {"model": str(models[dtype]), "dtype": dtype, "patched": patched}
        prefix = f"{dtype}-{_state(patched)}"
        batch = rollout_file(out, Row(dtype, "batch", "", patched))

        engines: dict[tuple[int, int | None], dict[str, str]] = {}
        for name in dict.fromkeys(row.rollout for row in mine):
            tp, chunk, mode = _rollout_engine(name)
            path = rollout_file(out, Row(dtype, name, "", patched))
            runs = engines.setdefault((tp, chunk), {})
            if mode == "prompt_logprobs":
                runs.setdefault("batch", str(batch))  # it evaluates the tokens sampled there
            runs[mode] = str(path)
        for (tp, chunk), runs in engines.items():
            spec = common | {
                "tp": tp, "max_num_batched_tokens": chunk,
                "runs": [{"mode": mode, "out": path} for mode, path in runs.items()],
                "prompts": prompts, "max_tokens": max_tokens, "temperature": temperature, "seed": seed,
                "tokens_from": str(batch) if "prompt_logprobs" in runs else None,
            }
            name = f"{prefix}-rollout-tp{tp}" + ("-chunked" if chunk else "")
            first.append(Job(name, "alignkit.check.rollout", spec))

        for engine in dict.fromkeys(row.training.rpartition("-")[0] for row in mine):
            of_engine = [row for row in mine if row.training.rpartition("-")[0] == engine]
            runs = [{"mode": row.training.rpartition("-")[2], "in": str(rollout_file(out, row)),
                     "out": str(training_file(out, row))} for row in of_engine]
            spec = common | {"tp": int(engine.removesuffix("-sp").removeprefix("tp")),
                             "sequence_parallel": engine.endswith("-sp"), "runs": runs}
            second.append(Job(f"{prefix}-training-{engine}", "alignkit.check.train", spec,
                              needs=list(dict.fromkeys(Path(run["in"]) for run in runs))))
    return first + second


def write(job: Job, path: Path) -> None:
    path.write_text(json.dumps(job.spec, indent=1) + "\n")


def _state(patched: bool) -> str:
    return "patched" if patched else "stock"


def _rollout_engine(name: str) -> tuple[int, int | None, str]:
    """(tp, max_num_batched_tokens, mode) of a rollout's name."""
    if name == "chunked":
        return 1, CHUNK, "batch"
    if name.startswith("tp"):
        return int(name.removeprefix("tp")), None, "batch"
    return 1, None, name
