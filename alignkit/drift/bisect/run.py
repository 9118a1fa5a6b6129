"""Runs both sides of a bisection, each engine in a process of its own, and compares what they recorded."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...check import plan
from ...check import run as checks
from ...check.machine import gpus, installed, machine, no_room, require_environment
from ...check.model import MAX_POSITION, make_checkpoint
from ...check.plan import Job
from ...check.run import Progress, WorkerError
from ...convert import Architecture, Checkpoint, check_weights, read_architecture
from ...errors import InputError, UnsupportedError
from . import recording, tokens
from .comparison import STOCK, Comparison, add_values, check_comparable, choose, compare
from .points import OPS, points
from .recording import Recording

ENGINES = {
    "stock-vllm": ("vllm", False),
    "aligned-vllm": ("vllm", True),
    "stock-megatron": ("megatron", False),
    "aligned-megatron": ("megatron", True),
    "hf": ("hf", False),
}
_MODULES = {
    "vllm": ("vLLM", "vllm"),
    "megatron": ("Megatron-core", "megatron.core"),
    "hf": ("transformers", "transformers"),
}
MODES = ("padded", "one", "packed")


def module_of(engine: str) -> str:
    """What records it: for ``python -m``, with a job of `job`."""
    return f"{__package__}.{engine}_side"


LENGTHS = (5, 17, 64, 100)
VOCAB = 2000
"""Of the model that is made."""
BUDGET = 2**28
FILES = ("bisect.json", "report.html")
FOLDERS = ("recordings", "values", "swapped", "logs", "jobs")


@dataclass
class Side:
    """One side: an engine, or the directory of a recording. mode: of Megatron-core's and Hugging Face's micro-batches;
    chunk: most tokens of a step of vLLM's; batch_invariant: vLLM's mode of that name."""

    name: str
    engine: str | None = None
    patched: bool = False
    tp: int = 1
    mode: str = "padded"
    chunk: int | None = None
    batch_invariant: bool = False
    directory: Path | None = None

    @property
    def stock(self) -> bool:
        return self.engine is not None and not self.patched


def parse_side(text: str) -> Side:
    """``stock-vllm``, ``aligned-megatron:tp=2,mode=one``, ``stock-vllm:chunk=16``, or a recording's directory.

    Raises InputError naming what is wrong with it."""
    name, _, settings = text.partition(":")
    if name not in ENGINES:
        if (Path(text) / recording.JSON).is_file():
            return Side(text, directory=Path(text))
        raise InputError(f"side: {text!r} is none of {', '.join(ENGINES)}, nor a directory with a {recording.JSON}")
    engine, patched = ENGINES[name]
    side = Side(text, engine, patched)
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key == "mode" and engine != "vllm":
            if value not in MODES or (value == "packed" and name != "aligned-megatron"):
                raise InputError(f"side: {text}: mode {value!r} is not one of {name}'s; packed is aligned-megatron's")
            side.mode = value
        elif key == "batch_invariant" and name == "stock-vllm":
            if value != "1":
                raise InputError(f"side: {text}: batch_invariant {value!r} is not 1")
            side.batch_invariant = True
        elif (key == "tp" and engine != "hf") or (key == "chunk" and engine == "vllm"):
            if not value.isdecimal() or not 0 < int(value) < 2**20:
                raise InputError(f"side: {text}: {key} {value!r} is not a positive number")
            setattr(side, key, int(value))
        else:
            raise InputError(f"side: {text}: {name} has no setting {key!r}")
    return side


@dataclass
class Options:
    """a, b: as `parse_side` takes them. out: directory for what is written.
    model: HF checkpoint directory; None makes a small random one of the family `arch` ("qwen3", "qwen2", "llama").
    tokens: a logprob file, or a monitor's replay, whose sequences, prompts and samples, are run; None draws random ones.
    decode: tokens that the first vLLM side samples after each sequence, so that its steps are decodes.
    swap: an op to exchange for alignkit's on every stock side, in a run of its own. budget: bytes of tensors a side.
    timeout: seconds that one engine's process may take.
    """

    a: str
    b: str
    out: Path
    model: Path | None = None
    arch: str = "qwen3"
    dtype: str = "bfloat16"
    tokens: Path | None = None
    decode: int = 0
    swap: str | None = None
    budget: int = BUDGET
    seed: int = 0
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        for name in ("out", "model", "tokens"):  # strings are paths too
            if isinstance(path := getattr(self, name), str):
                setattr(self, name, Path(path))


@dataclass
class Result:
    """swapped: the comparison with one op exchanged, where asked for."""

    a: Recording
    b: Recording
    names: tuple[str, str]
    comparison: Comparison
    swap: str | None
    swapped: Comparison | None
    info: dict = field(default_factory=dict)

    @property
    def confirmed(self) -> bool | None:
        """Whether the first difference goes when the op is exchanged; None if nothing was, or there is none."""
        if self.swapped is None or self.comparison.suspect is None:
            return None
        return all(p.differing == 0 for p in self.swapped.points if p.point == self.comparison.suspect.point)

    def to_json(self) -> dict:
        sides = {
            name: {"side": text, "engine": r.engine, "contract": r.contract, "settings": r.settings}
            for name, text, r in (("a", self.names[0], self.a), ("b", self.names[1], self.b))
        }
        swapped = None
        if self.swapped is not None:
            swapped = {"op": self.swap, "confirmed": self.confirmed} | self.swapped.to_json()
        return {
            **sides,
            "weights": self.a.weights,
            "architecture": self.a.architecture,
            "sequences": [len(s) for s in self.a.sequences],
            **self.comparison.to_json(),
            "swap": swapped,
            "run": self.info,
        }


def bisect(options: Options, progress: Progress | None = None) -> Result:
    """Runs both sides, compares them and writes ``bisect.json`` and the recordings into `options.out`.

    First all points are recorded as digests; then, if any differs, values of the first that does and of others, within
    the budget, in a second run that must put out the same bits again. Where the budget holds the values of everything,
    the first run records them, and there is no second one.
    Raises InputError or UnsupportedError before an engine is started for what cannot be compared, WorkerError if an
    engine fails or is not deterministic.
    """
    started = time.monotonic()
    progress = progress or Progress()
    sides = [parse_side(options.a), parse_side(options.b)]
    _check(options, sides)
    given = {i: recording.load(side.directory) for i, side in enumerate(sides) if side.directory}
    arch = _model_of(options, sides)
    sequences = _sequences(options, sides, given, arch)
    checks.prepare(options.out, FILES, FOLDERS, "bisect")
    out = options.out.resolve()
    weights, model = next(iter(given.values())).weights if given else "", options.model
    if len(given) < 2:
        model = (
            options.model
            or make_checkpoint(
                out / "model", options.arch, getattr(torch, options.dtype), seed=options.seed, vocab=VOCAB
            )
        ).resolve()
        _check_sides(options, sides, read_architecture(model))
        weights = recording.weights_digest(model)
        for i, one in given.items():
            _check_given(sides[i], one, read_architecture(model), weights)
    common = {
        "model": str(model),
        "weights": weights,
        "dtype": options.dtype,
        "seed": options.seed,
        "sequences": sequences,
    }
    rows = sum(map(len, sequences)) + options.decode * len(sequences)
    everything = None
    if model and 4 * rows * sum(p.width for p in points(read_architecture(model))) <= options.budget:
        everything = {p.name: list(range(rows)) for p in points(read_architecture(model))}
    jobs = _Jobs(sides, common, options, out)
    seconds, _ = checks.execute(jobs.first(everything) + jobs.swapped(), out, options.timeout, progress)
    a, b = (given.get(i) or recording.load(jobs.directory("recordings", i)) for i in range(2))
    comparison = compare(a, b)
    keep = {} if everything else choose(comparison, a, options.budget)
    if keep and len(given) < 2:
        more, _ = checks.execute(jobs.values(keep), out, options.timeout, progress)
        seconds |= more
        for i, side in enumerate((a, b)):
            if i not in given:
                _take_values(side, recording.load(jobs.directory("values", i)))
        add_values(comparison, a, b)
    swapped = None
    if options.swap:
        swapped = compare(
            *((a, b)[i] if not sides[i].stock else recording.load(jobs.directory("swapped", i)) for i in range(2))
        )
    info = machine() | {"seconds": seconds | {"all": round(time.monotonic() - started, 1)}}
    result = Result(a, b, (options.a, options.b), comparison, options.swap, swapped, info)
    checks.write_json(out / "bisect.json", result.to_json())
    return result


def _check(options: Options, sides: list[Side]) -> None:
    """Everything that can be refused without reading a model or a recording."""
    for side in sides:
        if side.engine:
            name, module = _MODULES[side.engine]
            if not installed(module):
                raise UnsupportedError(f"{name} is not installed here, which {side.name} runs")
            if problem := no_room(side.tp):
                raise InputError(f"tp: {problem}")
            if side.batch_invariant and not gpus():
                raise UnsupportedError("batch_invariant: vLLM has that mode on GPUs only")
        elif options.out.exists() and options.out.resolve() in side.directory.resolve().parents:
            raise InputError(f"out: {options.out} holds the recording {side.directory}, which would be deleted")
    if options.dtype not in plan.DTYPES:
        raise InputError(f"dtype: {options.dtype!r} is not one of {', '.join(plan.DTYPES)}")
    if options.swap is not None:
        if options.swap not in OPS:
            raise InputError(f"swap: {options.swap!r} is not one of {', '.join(OPS)}")
        if not any(side.stock for side in sides):
            raise InputError("swap: neither side is a stock engine, so there is nothing to exchange")
    if not 0 <= options.decode <= 4096:
        raise InputError(f"decode: {options.decode} is not in [0, 4096]")
    if options.decode:
        decoding = next((side for side in sides if side.engine == "vllm"), None)
        if decoding is None:
            raise InputError("decode: neither side is a vLLM engine")
        if any(side.directory for side in sides):
            raise InputError("decode: the tokens of a recording are given; a vLLM side cannot be made to sample them")
        if options.swap and decoding.stock:
            raise UnsupportedError(
                f"swap: with decode, {decoding.name} could sample other tokens once an op is exchanged"
            )
    require_environment()
    if options.budget < 2**16:
        raise InputError(f"budget: {options.budget} bytes are less than {2**16}")
    if not 0 <= options.seed < 2**32:
        raise InputError(f"seed: {options.seed} is not in [0, 2^32)")
    if not options.timeout > 0:
        raise InputError(f"timeout: {options.timeout} is not positive")
    if options.model is None and any(side.directory for side in sides) and any(side.engine for side in sides):
        raise InputError(
            "model: the checkpoint of the recording is needed to run the other side; one that alignkit bisect made lies in the "
            "folder model beside the recordings"
        )
    checks.check_out(options.out, "bisect")


def _model_of(options: Options, sides: list[Side]) -> Architecture | None:
    """Of the given model, after a look at what engines could not be started on."""
    if options.model is None:
        return None
    arch = read_architecture(options.model)
    _check_sides(options, sides, arch)
    check_weights(arch, Checkpoint(options.model))
    return arch


_RECORDED = "of mixtures, those with experts in all layers, chosen by softmax, are"


def _check_sides(options: Options, sides: list[Side], arch: Architecture) -> None:
    """Whether the engines can be started on such a model."""
    for side in sides:
        if side.engine:
            arch.check_tp(side.tp)
        if arch.experts and side.engine == "hf":
            raise UnsupportedError(f"{side.name}: a mixture of experts ({arch.family}) is not recorded there")
    if arch.dense_layers or arch.score != "softmax":
        raise UnsupportedError(f"model: {arch.family} with such layers or routers is not recorded: {_RECORDED}")
    if arch.experts and options.swap is not None:
        raise UnsupportedError(f"swap: of a mixture of experts ({arch.family}) no op is exchanged")


def _sequences(
    options: Options, sides: list[Side], given: dict[int, Recording], arch: Architecture | None
) -> list[list[int]]:
    if options.tokens is not None:
        sequences, replay = tokens.read(options.tokens)
        if replay is not None:
            tokens.check_contract(options.tokens, replay, any(side.engine and not side.stock for side in sides))
        if any(one.sequences != sequences for one in given.values()):
            raise InputError(f"tokens: {options.tokens} holds others than the recording")
    elif given:
        sequences = next(iter(given.values())).sequences
    else:
        sequences = plan.draw_prompts(arch.vocab if arch else VOCAB, options.seed, LENGTHS)
    if not sequences or not all(sequences):
        raise InputError("tokens: none, or an empty sequence")
    if len(set(map(tuple, sequences))) < len(sequences):
        raise InputError("tokens: two sequences are the same; rows could not be told apart")
    if len(given) < 2:
        vocab, positions = (arch.vocab, arch.max_position) if arch else (VOCAB, MAX_POSITION)
        if max(map(max, sequences)) >= vocab:
            raise InputError(f"tokens: an id is beyond the model's vocabulary of {vocab}")
        longest = max(map(len, sequences)) + options.decode + 1
        if longest > positions:
            raise InputError(f"tokens: {longest} positions, the model has {positions}")
    return sequences


def _check_given(side: Side, one: Recording, arch: Architecture, weights: str) -> None:
    expected = Recording("", STOCK, vars(arch), weights, one.sequences, {}, {}, {}, {})
    try:
        check_comparable(one, expected)
    except InputError as e:
        raise InputError(f"{side.directory}: {e}; not of the model that the other side runs") from None


def _take_values(side: Recording, again: Recording) -> None:
    """The values of a second run, which must have put out what the first did: else they would explain nothing."""
    if side.sequences != again.sequences:
        raise WorkerError(f"{side.engine}: not deterministic, a second run sampled other tokens")
    for name, rows in again.kept.items():
        if (side.digests[name][rows] != again.digests[name][rows]).any():
            raise WorkerError(f"{side.engine}: not deterministic, a second run gave other bits at {name}")
        if name not in side.values:
            side.values[name], side.kept[name] = again.values[name], rows


class _Jobs:
    def __init__(self, sides: list[Side], common: dict, options: Options, out: Path):
        self._sides, self._common, self._options, self._out = sides, common, options, out
        self._decoding = next((i for i, s in enumerate(sides) if s.engine == "vllm"), None) if options.decode else None

    def directory(self, kind: str, i: int) -> Path:
        return self._out / kind / "ab"[i]

    def first(self, keep: dict[str, list[int]] | None) -> list[Job]:
        return [self._job(i, "recordings", "", keep=keep) for i, side in enumerate(self._sides) if side.engine]

    def swapped(self) -> list[Job]:
        if self._options.swap is None:
            return []
        return [
            self._job(i, "swapped", f"-{self._options.swap}", swap=self._options.swap)
            for i, side in enumerate(self._sides)
            if side.stock
        ]

    def values(self, keep: dict[str, list[int]]) -> list[Job]:
        return [self._job(i, "values", "-values", keep=keep) for i, side in enumerate(self._sides) if side.engine]

    def _job(self, i: int, kind: str, suffix: str, keep: dict | None = None, swap: str | None = None) -> Job:
        side = self._sides[i]
        assert side.engine is not None  # a recording is not run
        run = {"out": str(self.directory(kind, i) / recording.JSON)}
        needs = []
        decode = self._options.decode if i == self._decoding else 0
        if self._decoding is not None and not decode:
            run["in"] = str(self.directory("recordings", self._decoding) / recording.JSON)
            needs = [Path(run["in"])] if kind != "values" else []  # it is there by then
        spec = self._common | {
            "engine": side.engine,
            "patched": side.patched,
            "tp": side.tp,
            "mode": side.mode,
            "chunk": side.chunk,
            "batch_invariant": side.batch_invariant,
            "decode": decode,
            "keep": keep,
            "swap": [swap] if swap else [],
            "runs": [run],
        }
        name = side.name.replace(":", "-").replace("=", "").replace(",", "-")
        return Job(f"{'ab'[i]}-{name}{suffix}", module_of(side.engine), spec, needs)
