"""Cost of alignment in whole engines on one GPU: ``make gpu-cost``, or ``python benchmarks/cost.py`` with options.

Rollout: 64 and 256 concurrent requests to vLLM in its default mode (torch.compile, CUDA graphs), with prompts of 5 to
1500 tokens or of 32 tokens; each samples 128 tokens with logprobs. A third case measures prefill: the long prompts with
one sampled token. Training: forward and backward of a Megatron-core model. All engines use the same random-weight
Qwen3, or a MoE model with --size, and run in separate processes. Values are medians. Steps of small models are
CPU-bound, so their engines share the GPU and their repeats are interleaved.

Engines: "stock"; "batch_invariant", stock vLLM with VLLM_BATCH_INVARIANT=1; "stock_fused", stock Megatron-core with the
fusions that need no TransformerEngine; "hf_compiled", Hugging Face's model with torch.compile; "aligned";
"aligned_keeping", with ``patch_megatron(..., keep_logits=True)``; "stock_te" and "aligned_te", Megatron-core with
TransformerEngine's layer spec, skipped if it is not installed. Stock experts are SequentialMLP with Megatron-core's
local layer spec and TEGroupedMLP with TransformerEngine's.

The result files are benchmarks/results/h200/cost.jsonl and profile.jsonl (``lib/results.py``). A row of cost.jsonl has
``what`` ("rollout" or "training"), ``case``, ``engine``, ``value``, ``unit`` and ``ratio_to_stock``. Rows of training
also have ``x``, the time or memory relative to "hf_compiled" in the same run. A row of profile.jsonl has the GPU time
by kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from cost_training import TRANSFORMER_ENGINE
from lib import profiles
from lib.models import MOE_SIZES, random_lengths
from lib.models import SIZES as DENSE
from lib.options import parser as options_parser
from lib.results import H200, distinct, merge, read, run_info, run_name, sources, stale, write

from alignkit.jobs.execute import Progress, execute, prepare
from alignkit.jobs.job import Job
from alignkit.jobs.model import make_checkpoint
from alignkit.jobs.terminal import interrupted_by_sigterm
from alignkit.runtime.machine import gpus, installed

MEASURED = ("rollout", "training")
PARTS = (*MEASURED, "profile")
ROLLOUT_ENGINES = ("stock", "batch_invariant", "aligned")
TRAINING_ENGINES = ("stock", "stock_fused", "hf_compiled", "aligned", "aligned_keeping", *TRANSFORMER_ENGINE)
SIZES = DENSE | MOE_SIZES
DUMMY_WEIGHTS = tuple(size for size in SIZES if size.startswith(("qwen3-8b", "qwen3-30b-a3b")))
"""Sizes for which vLLM generates dummy weights, to avoid checkpoints of 16 and 61 GB.

Training generates random weights at every size.
"""
SHORT = 32
"""Prompt tokens of cases that measure decode."""
KEY = ("what", "case", "engine", "unit")
PROFILE_KEY = ("what", "case", "engine")
SHAPE = re.compile(r"(\d+) x (\d+)")
"""Micro-batch of a training case."""
REQUESTS = re.compile(r"(\d+) request")
"""Concurrency of a rollout case."""


class Lines(Progress):
    """A progress display that prints a line per engine."""

    def started(self, job: Job) -> None:
        print(f"{job.name} ...", flush=True)

    def ended(self, job: Job, seconds: float, failure: str | None) -> None:
        print(f"{job.name}: {seconds:.1f} s" + (f"  FAILED: {failure}" if failure else ""), flush=True)


def title_prefix(size: str, eager: bool) -> str:
    """Return the prefix of case names: the settings that differ from the defaults."""
    parts = ([] if size == "large" else [size]) + (["eager"] if eager else [])
    return f"{', '.join(parts)}: " if parts else ""


def rollout_cases(
    title: str, concurrency: list[int], longest: int, max_tokens: int, measured: bool, profiled: bool
) -> list[dict]:
    """Return the cases of the rollout engines; those with the first concurrency are also profiled."""
    cases = []
    for n in concurrency:
        first, requests = profiled and n == concurrency[0], f"{title}{n} request{'s' * (n > 1)}"
        lengths = random_lengths(n, longest)
        for name, prompts, tokens, part in (
            (requests, lengths, max_tokens, "prefill"),
            (f"{requests}, short prompts", (SHORT,) * n, max_tokens, "decode"),
            (f"{requests}, prefill", lengths, 1, None),
        ):
            if measured or (first and part):
                case = {"name": name, "lengths": prompts, "max_tokens": tokens, "profile": part if first else None}
                cases.append(case)
    return cases


def rollout_rows(results: dict[str, dict]) -> list[dict]:
    """Return the rows of rollout results, which are given by engine."""
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
    """Return the rows of training results, which are given by engine."""
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
    compiled = {(row["case"], row["unit"]): row["value"] for row in rows if row["engine"] == "hf_compiled"}
    for row in rows:
        base = compiled.get((row["case"], row["unit"]))
        share = row["value"] / base if base else None
        row["x"] = 1 / share if share and row["unit"] == "tokens/s" else share
    return with_ratios(rows)


def with_ratios(rows: list[dict]) -> list[dict]:
    """Return the rows with ``ratio_to_stock``, which is None if stock was not measured in the same run."""
    stock = {(row["case"], row["unit"]): row["value"] for row in rows if row["engine"] == "stock"}
    ratios = []
    for row in rows:
        base = stock.get((row["case"], row["unit"]))
        ratio = row["value"] / base if base else None
        fields = {k: row[k] for k in ("what", "case", "engine", "value", "unit")}
        ratios.append(fields | {"ratio_to_stock": ratio} | {k: v for k, v in row.items() if k not in fields})
    return ratios


class Bench:
    """One command: its jobs and their results."""

    def __init__(self, options: argparse.Namespace, **more):
        """Create the command; `more` are further fields of its run in the result files."""
        self.options = options
        self.keep: dict[str, set[tuple]] | None = None
        """Keys of the rows to store, by file; None: all rows."""
        self.out = options.out.resolve()
        self.name = run_name()
        self.info = run_info(
            packages=("transformer-engine",), size=options.size, repeats=options.repeats, seconds={}, engines={}, **more
        )
        self.failures: list[str] = []

    def prepare(self, weights: bool) -> Path:
        """Empty the output folder and write a model into it, with or without `weights`; return the model's path."""
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parent.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        prepare(self.out, (), ("logs", "jobs", "results"))
        model = self.out / "model"
        return make_checkpoint(model, dtype=torch.bfloat16, weights=weights, **SIZES[self.options.size])

    def run(self, specs: dict[str, dict], module: str) -> dict[str, dict]:
        """Run jobs concurrently and return their results by name; a failed job's result is partial."""
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
        """Run ``cost_rollout`` jobs and yield the results of each group.

        Args:
            specs: jobs by name.
            at_once: engines per group, which run concurrently with interleaved measurements.
            title: key of an engine in the run's ``engines`` field.
        """
        names = list(specs)
        for group in (names[i : i + at_once] for i in range(0, len(names), at_once)):
            file = self.out / f"turns-{group[0]}"
            file.unlink(missing_ok=True)
            turns = {"file": str(file), "engines": len(group), "seconds": self.options.timeout}
            jobs = {name: specs[name] | {"turns": turns | {"engine": i}} for i, name in enumerate(group)}
            results = list(self.run(jobs, "cost_rollout").values())
            concurrent = {"side_by_side": [specs[name]["engine"] for name in group]}
            for result in results:
                ran = {k: v for k, v in result.items() if k not in ("engine", "cases", "profiles")}
                self.info["engines"][title(result["engine"])] = ran | concurrent
            yield results

    def rollout(self, model: Path) -> None:
        options = self.options
        measured, profiled = "rollout" in options.only, "profile" in options.only
        title = title_prefix(options.size, options.eager and torch.cuda.is_available())  # eager is the default on a CPU
        cases = rollout_cases(
            title, options.concurrency, options.longest, options.max_tokens, measured=measured, profiled=profiled
        )
        engines = [engine for engine in ROLLOUT_ENGINES if engine in options.engines]
        specs = {
            f"rollout-{engine}": {
                "engine": engine,
                "model": str(model),
                "load_format": "dummy" if options.size in DUMMY_WEIGHTS else "auto",
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
        cases, title = [list(shape) for shape in options.shapes], title_prefix(options.size, eager=False)
        results = {}
        for engine in [e for e in TRAINING_ENGINES if e in options.engines]:
            if engine in TRANSFORMER_ENGINE and not installed("transformer_engine"):
                print(f"training-{engine}: skipped, TransformerEngine is not installed", flush=True)
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
                print(f"training-{engine}: {b} x {s} tokens skipped, out of memory", flush=True)
            if engine == "stock":  # its largest micro-batches are used for all engines
                cases = [[case["b"], case["s"]] for case in result["cases"]] + result["too_large"]
            self.save("training", training_rows(results, title) if measured else [], results, [engine], title)

    def save(
        self, what: str, rows: list[dict], results: dict[str, dict], new: Collection[str], title: str = ""
    ) -> None:
        """Merge rows into cost.jsonl and profile.jsonl, and print those of the `new` engines.

        `title` is the prefix of the profiles' case names.
        """
        for row in (row for row in rows if row["engine"] in new):
            ratio = f"{row['ratio_to_stock']:.3f} of stock" if row["ratio_to_stock"] else ""
            ratio += f"  {row['x']:.3f} of Hugging Face" if row.get("x") else ""
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
                f"{what}, {row['case']}, {row['engine']}: kernels {row['gpu_ms']:.2f} ms of {row['wall_ms']:.2f} ms; "
                + ", ".join(f"{k} {v:.2f}" for k, v in row["families"].items())
            )
            for kernel in row["kernels"][:8]:
                print(f"    {kernel['share']:6.1%} {kernel['ms']:9.3f} ms {kernel['calls']:>6} {kernel['name']}")
        folder = self.options.json
        for path, new_rows, key in (
            (folder / "cost.jsonl", rows, KEY),
            (folder / "profile.jsonl", profiled, PROFILE_KEY),
        ):
            if self.keep is not None:
                new_rows = [row for row in new_rows if tuple(row[k] for k in key) in self.keep[path.name]]
            if new_rows:
                write(path, merge(read(path), self.name, self.info, new_rows, key))


def _shape(text: str) -> tuple[int, int]:
    try:
        b, s = text.split("x")
        return int(b), int(s)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be SEQUENCESxTOKENS, such as 4x2048, got {text!r}") from None


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 2 if an engine failed, else 0."""
    parser = options_parser(__doc__, H200, json="result folder")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="parts to run; default: all. profile also profiles the other parts that are named; profile alone profiles "
        "both without timing them",
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=dict.fromkeys(ROLLOUT_ENGINES + TRAINING_ENGINES),
        default=list(dict.fromkeys(ROLLOUT_ENGINES + TRAINING_ENGINES)),
        help="engines to measure; default: all",
    )
    parser.add_argument("--size", choices=SIZES, default="large", help="model size")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[64, 256], help="numbers of concurrent requests")
    parser.add_argument("--longest", type=int, default=1500, help="longest prompt, in tokens")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to sample per prompt")
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=_shape,
        default=[(4, 2048), (8, 1024), (2, 4096)],
        help="training micro-batches, sequences x tokens, such as 4x2048",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="repeats of each measurement, of which the median is used"
    )
    parser.add_argument(
        "--turns",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run rollout engines concurrently, with interleaved repeats; default: yes, except for the sizes of "
        "qwen3-8b and qwen3-30b-a3b",
    )
    parser.add_argument(
        "--eager",
        action=argparse.BooleanOptionalAction,
        default=not torch.cuda.is_available(),
        help="run vLLM without torch.compile and CUDA graphs",
    )
    parser.set_defaults(parts=None)
    parser.add_argument("--timeout", type=float, default=300.0, help="time limit of an engine, in seconds")
    parser.add_argument("--out", type=Path, default=Path("check-results/cost"), help="folder for logs")
    options = parser.parse_args(arguments)
    if len(gpus()) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus()[0]
    if options.only_stale:
        return max((measure(each, keep) for each, keep in stale_commands(options)), default=0)
    return measure(options)


def stale_commands(options: argparse.Namespace) -> Iterator[tuple[argparse.Namespace, dict[str, set[tuple]]]]:
    """Yield the options of each model size and part that has stale rows, with the keys of these rows by file.

    All engines of the part's rows run, because ratios are relative to others in the same run.
    """
    keys = {"cost.jsonl": KEY, "profile.jsonl": PROFILE_KEY}
    files = {name: read(options.json / name) for name in keys}
    groups: dict[tuple[str, str], dict[str, list[dict]]] = {}
    for name, contents in files.items():
        for row in stale(contents, sources(), keys[name]):
            group = contents["runs"][row["run"]]["size"], row["what"]
            groups.setdefault(group, {file: [] for file in keys})[name].append(row)
    for (size, what), rows in groups.items():
        stored = [
            row
            for contents in files.values()
            for row in contents.get("rows", [])
            if (contents["runs"][row["run"]]["size"], row["what"]) == (size, what)
        ]
        engines, cases = ({row[field] for row in stored} for field in ("engine", "case"))
        numbers = [tuple(map(int, found.groups())) for case in sorted(cases) if (found := SHAPE.search(case))]
        counts = [int(found[1]) for case in sorted(cases) if (found := REQUESTS.search(case))]
        chosen = {
            "size": size,
            "only": [what] * bool(rows["cost.jsonl"]) + ["profile"] * bool(rows["profile.jsonl"]),
            "engines": [engine for engine in options.engines if engine in engines],
            "shapes": list(dict.fromkeys(numbers)) if what == "training" else options.shapes,
            "concurrency": sorted(set(counts)) if what == "rollout" else options.concurrency,
            "parts": [what],
        }
        keep = {name: set(distinct(rows[name], *key)) for name, key in keys.items()}
        yield argparse.Namespace(**vars(options) | chosen), keep


def measure(options: argparse.Namespace, keep: dict[str, set[tuple]] | None = None) -> int:
    """Run the engines and merge their rows, or those with the keys `keep`; return the exit status."""
    if options.turns is None:
        options.turns = options.size not in DUMMY_WEIGHTS
    started = time.monotonic()
    bench = Bench(options, max_tokens=options.max_tokens)
    bench.keep = keep
    parts = options.parts or [part for part in MEASURED if part in options.only] or MEASURED
    model = bench.prepare(weights=options.size not in DUMMY_WEIGHTS and "rollout" in parts)
    print(f"model written ({time.monotonic() - started:.0f} s)", flush=True)
    with interrupted_by_sigterm():
        if "rollout" in parts:
            bench.rollout(model)
        if "training" in parts:
            bench.training(model)
    for name in bench.failures:
        print(f"failed: {name}; log in {options.out / 'logs'}")
    print(f"{time.monotonic() - started:.0f} s; {options.json}")
    return 2 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
