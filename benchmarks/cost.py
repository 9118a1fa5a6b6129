"""What alignment costs on one GPU: ``make gpu-cost``, or ``python benchmarks/cost.py`` with options.

Rollout: 64 and 256 requests at once to vLLM in its default mode (torch.compile, CUDA graphs), prompts of 5 to 1500
tokens or all of 32, 128 tokens sampled for each with their logprobs; and prefill, the long prompts with one token each.
Training: forward and backward of a Megatron-core model. A random-weight Qwen3, or with --size a mixture of experts, the same
throughout; each engine in a process of its own; medians. Small models, whose engines fit on the GPU together and whose steps
wait for the host, are measured by turns.

benchmarks/results/h200/cost.json gets ``rows``: ``{"what", "case", "engine", "value", "unit", "ratio_to_stock"}``, those of
training also ``x``, the time or the memory over that of "hf_compiled" in the same run, and
``runs``: by the rows' ``run``, what they were made on. profile.json beside it gets GPU time by kernel, likewise.
Engines: "stock"; "batch_invariant", stock vLLM with VLLM_BATCH_INVARIANT=1; "stock_fused", stock Megatron with the
fusions that it can run without TransformerEngine; "hf_compiled", Hugging Face's model by torch.compile; "aligned", and "aligned_keeping", with ``patch_megatron(..., keep_logits=True)``;
"stock_te" and "aligned_te", Megatron with TransformerEngine's layer spec, left out where that is not installed. Stock experts
are computed one by one with Megatron's own layer spec (SequentialMLP), all in one with TransformerEngine's (TEGroupedMLP).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from cost_training import TRANSFORMER_ENGINE
from lib import profiles
from lib.models import MIXTURES, draw_lengths
from lib.models import SIZES as DENSE
from lib.options import parser as options_parser
from lib.results import H200, made_on, merge, read, run_name, write

from alignkit.check.machine import gpus, installed
from alignkit.check.model import make_checkpoint
from alignkit.check.plan import Job
from alignkit.check.run import Progress, execute, prepare
from alignkit.check.terminal import interrupted_by_sigterm

MEASURED = ("rollout", "training")
PARTS = (*MEASURED, "profile")
ROLLOUT_ENGINES = ("stock", "batch_invariant", "aligned")
TRAINING_ENGINES = ("stock", "stock_fused", "hf_compiled", "aligned", "aligned_keeping", *TRANSFORMER_ENGINE)
SIZES = DENSE | MIXTURES
UNWRITTEN = tuple(size for size in SIZES if size.startswith(("qwen3-8b", "qwen3-30b-a3b")))
"""Sizes whose weights vLLM makes up for itself, small and random: nothing is learnt from writing 16 or 61 GB. Training draws
its weights at every size."""
SHORT = 32
"""Tokens of a prompt where decoding is what is measured."""
KEY = ("what", "case", "engine", "unit")
PROFILE_KEY = ("what", "case", "engine")


class Lines(Progress):
    """A line for each engine."""

    def started(self, job: Job) -> None:
        print(f"{job.name} ...", flush=True)

    def ended(self, job: Job, seconds: float, failure: str | None) -> None:
        print(f"{job.name}: {seconds:.1f} s" + (f"  FAILED: {failure}" if failure else ""), flush=True)


def titled(size: str, eager: bool) -> str:
    """How names of cases begin: with what is not usual."""
    said = ([] if size == "large" else [size]) + (["eager"] if eager else [])
    return f"{', '.join(said)}: " if said else ""


def rollout_cases(
    title: str, concurrency: list[int], longest: int, max_tokens: int, measured: bool, profiled: bool
) -> list[dict]:
    """What the rollout engines are timed with; the profile is of the fewest requests."""
    cases = []
    for n in concurrency:
        first, requests = profiled and n == concurrency[0], f"{title}{n} request{'s' * (n > 1)}"
        drawn = draw_lengths(n, longest)
        for name, lengths, tokens, part in (
            (requests, drawn, max_tokens, "prefill"),
            (f"{requests}, short prompts", (SHORT,) * n, max_tokens, "decode"),
            (f"{requests}, prefill", drawn, 1, None),
        ):
            if measured or (first and part):
                case = {"name": name, "lengths": lengths, "max_tokens": tokens, "profile": part if first else None}
                cases.append(case)
    return cases


def rollout_rows(results: dict[str, dict]) -> list[dict]:
    """Rows from the results of the engines by name."""
    rows = []
    for result in results.values():
        for case in result["cases"]:
            out = case["requests"] * case["max_tokens"]
            seconds = statistics.median(case["seconds"])
            units = {"output tokens/s": out, "total tokens/s": out + case["prompt_tokens"]}
            if case["max_tokens"] == 1:
                units = {"prompt tokens/s": case["prompt_tokens"]}
            for unit, tokens in units.items():
                rows.append(
                    {
                        "what": "rollout",
                        "case": case["name"],
                        "engine": result["engine"],
                        "value": tokens / seconds,
                        "unit": unit,
                        "seconds": case["seconds"],
                    }
                )
    return with_ratios(rows)


def training_rows(results: dict[str, dict], title: str = "") -> list[dict]:
    """Rows from the results of the engines by name."""
    rows = []
    for result in results.values():
        for case in result["cases"]:
            name = f"{title}{case['b']} x {case['s']} tokens"
            common = {"what": "training", "case": name, "engine": result["engine"]}
            rows.append(
                common
                | {
                    "value": case["b"] * case["s"] / statistics.median(case["seconds"]),
                    "unit": "tokens/s",
                    "seconds": case["seconds"],
                }
            )
            rows.append(common | {"value": case["peak_bytes"] / 2**30, "unit": "GiB, peak"})
    beside = {(row["case"], row["unit"]): row["value"] for row in rows if row["engine"] == "hf_compiled"}
    for row in rows:
        neighbour = beside.get((row["case"], row["unit"]))
        share = row["value"] / neighbour if neighbour else None
        row["x"] = 1 / share if share and row["unit"] == "tokens/s" else share
    return with_ratios(rows)


def with_ratios(rows: list[dict]) -> list[dict]:
    """The rows with ``ratio_to_stock``; None where stock was not measured beside it."""
    stock = {(row["case"], row["unit"]): row["value"] for row in rows if row["engine"] == "stock"}
    ratios = []
    for row in rows:
        base = stock.get((row["case"], row["unit"]))
        ratio = row["value"] / base if base else None
        fields = {k: row[k] for k in ("what", "case", "engine", "value", "unit")}
        ratios.append(fields | {"ratio_to_stock": ratio} | {k: v for k, v in row.items() if k not in fields})
    return ratios


class Bench:
    """One command: its jobs, and what they gave."""

    def __init__(self, options: argparse.Namespace, **more):
        """more: what else the results say of it."""
        self.options = options
        self.out = options.out.resolve()
        self.name = run_name()
        self.info = made_on(
            packages=("transformer-engine",), size=options.size, repeats=options.repeats, seconds={}, engines={}, **more
        )
        self.failures: list[str] = []

    def prepare(self, weights: bool) -> Path:
        """An empty place to write to, with a model in it, of which `weights` are written or not."""
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parent.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        prepare(self.out, (), ("logs", "jobs", "results"))
        model = self.out / "model"
        return make_checkpoint(model, dtype=torch.bfloat16, weights=weights, **SIZES[self.options.size])

    def run(self, specs: dict[str, dict], module: str) -> dict[str, dict]:
        """The results of jobs that run side by side, by name; of one that failed, what it had written."""
        paths = {name: self.out / "results" / f"{name}.json" for name in specs}
        jobs = [
            Job(name, module, {"tp": 1} | spec | {"runs": [{"out": str(paths[name])}]}) for name, spec in specs.items()
        ]
        seconds, failures = execute(jobs, self.out, self.options.timeout, Lines(), keep_going=True, per_gpu=len(jobs))
        self.info["seconds"] |= seconds
        self.failures += failures
        return {name: json.loads(paths[name].read_text()) for name in specs if paths[name].exists()}

    def rollout_engines(
        self, specs: dict[str, dict], at_once: int, title: Callable[[str], str]
    ) -> Iterator[list[dict]]:
        """The results of ``cost_rollout``, of so many engines at once: side by side, measured by turns. title: of an engine,
        where the results say what ran."""
        names = list(specs)
        for some in (names[i : i + at_once] for i in range(0, len(names), at_once)):
            file = self.out / f"turns-{some[0]}"
            file.unlink(missing_ok=True)
            turns = {"file": str(file), "engines": len(some), "seconds": self.options.timeout}
            jobs = {name: specs[name] | {"turns": turns | {"engine": i}} for i, name in enumerate(some)}
            found = list(self.run(jobs, "cost_rollout").values())
            together = {"side_by_side": [specs[name]["engine"] for name in some]}
            for result in found:
                ran = {k: v for k, v in result.items() if k not in ("engine", "cases", "profiles")}
                self.info["engines"][title(result["engine"])] = ran | together
            yield found

    def rollout(self, model: Path) -> None:
        options = self.options
        measured, profiled = "rollout" in options.only, "profile" in options.only
        title = titled(options.size, options.eager and torch.cuda.is_available())  # on a CPU it always is
        cases = rollout_cases(
            title, options.concurrency, options.longest, options.max_tokens, measured=measured, profiled=profiled
        )
        engines = [engine for engine in ROLLOUT_ENGINES if engine in options.engines]
        specs = {
            f"rollout-{engine}": {
                "engine": engine,
                "model": str(model),
                "load_format": "dummy" if options.size in UNWRITTEN else "auto",
                "eager": options.eager,
                "cases": cases,
                "repeats": options.repeats if measured else 0,
            }
            for engine in engines
        }
        results = {}
        at_once = max(len(specs), 1) if options.turns else 1
        for found in self.rollout_engines(specs, at_once, "rollout {}".format):
            new = {result["engine"]: result for result in found}
            results |= new
            self.save("rollout", rollout_rows(results) if measured else [], results, new)

    def training(self, model: Path) -> None:
        options = self.options
        measured, profiled = "training" in options.only, "profile" in options.only
        cases, title = [list(shape) for shape in options.shapes], titled(options.size, eager=False)
        results = {}
        for engine in [e for e in TRAINING_ENGINES if e in options.engines]:
            if engine in TRANSFORMER_ENGINE and not installed("transformer_engine"):
                print(f"training-{engine}: left out, TransformerEngine is not installed", flush=True)
                continue
            spec = {
                "engine": engine,
                "model": str(model),
                "cases": cases,
                "repeats": options.repeats,
                "profile": profiled,
            }
            result = self.run({f"training-{engine}": spec}, "cost_training").get(f"training-{engine}")
            if result is None:
                continue
            results[engine] = result
            if result["experts"]:
                self.info["engines"][f"training {engine}"] = {"experts": result["experts"]}
            for b, s in result["too_large"]:
                print(f"training-{engine}: {b} x {s} tokens left out, they do not fit the memory", flush=True)
            if engine == "stock":  # what fits it is what all are measured with
                cases = [[case["b"], case["s"]] for case in result["cases"]] + result["too_large"]
            self.save("training", training_rows(results, title) if measured else [], results, [engine], title)

    def save(
        self, what: str, rows: list[dict], results: dict[str, dict], new: Collection[str], title: str = ""
    ) -> None:
        """Merges into cost.json and profile.json, and prints what the `new` engines gave. title: of the profiles' cases."""
        for row in (row for row in rows if row["engine"] in new):
            ratio = f"{row['ratio_to_stock']:.3f} of stock" if row["ratio_to_stock"] else ""
            ratio += f"  {row['x']:.3f} over Hugging Face" if row.get("x") else ""
            print(
                f"{row['what']:<8} {row['case']:<30} {row['engine']:<16} {row['value']:>10.1f} {row['unit']:<16} "
                f"{ratio}"
            )
        profiled = [
            {"what": what, "case": f"{title}{p['case']}", "engine": result["engine"]}
            | profiles.summary(p["kernels"], p["wall_ms"])
            for result in results.values()
            for p in result["profiles"]
        ]
        for row in (row for row in profiled if row["engine"] in new):
            print(
                f"{what}, {row['case']}, {row['engine']}: {row['gpu_ms']:.2f} ms of {row['wall_ms']:.2f} ms; "
                + ", ".join(f"{k} {v:.2f}" for k, v in row["families"].items())
            )
            for kernel in row["kernels"][:8]:
                print(f"    {kernel['share']:6.1%} {kernel['ms']:9.3f} ms {kernel['calls']:>6} {kernel['name']}")
        folder = self.options.json
        for path, made, key in ((folder / "cost.json", rows, KEY), (folder / "profile.json", profiled, PROFILE_KEY)):
            if made:
                write(path, merge(read(path), self.name, self.info, made, key))


def _shape(text: str) -> tuple[int, int]:
    b, s = text.split("x")
    return int(b), int(s)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 if an engine failed, after all others have run."""
    parser = options_parser(__doc__, H200, json="folder of the results")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="profile beside rollout or training is of that; by itself it is of both, and nothing is measured",
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=dict.fromkeys(ROLLOUT_ENGINES + TRAINING_ENGINES),
        default=list(dict.fromkeys(ROLLOUT_ENGINES + TRAINING_ENGINES)),
    )
    parser.add_argument("--size", choices=SIZES, default="large", help="of the model")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[64, 256], help="requests at once")
    parser.add_argument("--longest", type=int, default=1500, help="prompt, in tokens")
    parser.add_argument("--max-tokens", type=int, default=128, help="sampled for each prompt")
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=_shape,
        default=[(4, 2048), (8, 1024), (2, 4096)],
        help="micro-batches of training, as 4x2048",
    )
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement; the median counts")
    parser.add_argument(
        "--turns",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="rollout engines side by side, measured by turns (the default but for sizes of qwen3-8b and qwen3-30b-a3b)",
    )
    parser.add_argument(
        "--eager",
        action=argparse.BooleanOptionalAction,
        default=not torch.cuda.is_available(),
        help="vLLM without torch.compile and CUDA graphs",
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one engine may take")
    parser.add_argument("--out", type=Path, default=Path("check-results/cost"), help="logs")
    options = parser.parse_args(arguments)
    if options.turns is None:
        options.turns = options.size not in UNWRITTEN

    started = time.monotonic()
    if len(gpus()) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus()[0]
    bench = Bench(options, max_tokens=options.max_tokens)
    parts = [part for part in MEASURED if part in options.only] or MEASURED
    model = bench.prepare(weights=options.size not in UNWRITTEN and "rollout" in parts)
    print(f"the model is made ({time.monotonic() - started:.0f} s)", flush=True)
    with interrupted_by_sigterm():
        if "rollout" in parts:
            bench.rollout(model)
        if "training" in parts:
            bench.training(model)
    for name in bench.failures:
        print(f"failed: {name}")
    print(f"{time.monotonic() - started:.0f} s; {options.json}")
    return 2 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
