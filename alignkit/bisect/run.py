"""Driver of a bisection: runs both sides in separate engine processes and compares their recordings.

`check.run` starts the processes, the ``*_side`` modules record, and `comparison` compares. docs/bisect.md documents
bisect.json and the syntax of a side: a new setting or field must change there too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..convert import Architecture, Checkpoint, check_weights, read_architecture
from ..errors import InputError, UnsupportedError
from ..jobs.execute import INSTALL, Progress, WorkerError, check_out, execute, prepare, write_json
from ..jobs.job import DTYPES, Job, draw_prompts
from ..jobs.model import MAX_POSITION, make_checkpoint
from ..runtime.machine import gpus, installed, machine, no_room, require_environment
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
    "hf": ("the package transformers", "transformers"),
}
MODES = ("padded", "one", "packed")


def module_of(engine: str) -> str:
    """Return the module that records an engine, run as ``python -m MODULE JOB.json``."""
    return f"{__package__}.{engine}_side"


LENGTHS = (5, 17, 64, 100)
"""Lengths of the random sequences, in tokens."""
VOCAB = 2000
"""Vocabulary size of the generated model."""
BUDGET = 2**28
"""Default of `Options.budget`, in bytes; `--budget` of alignkit/cli.py has the same default, in MiB."""
FILES = ("bisect.json", "report.html")
FOLDERS = ("recordings", "values", "swapped", "logs", "jobs")
"""Contents of the output directory: a new run deletes `FILES`, and empties `FOLDERS`."""


@dataclass
class Side:
    """One side of a bisection: an engine, or the directory of a recording.

    mode: micro-batches of Megatron-core and Hugging Face, from `MODES`. chunk: maximum tokens per step of vLLM.
    batch_invariant: run vLLM with VLLM_BATCH_INVARIANT=1.
    """

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
    """Parse a side such as ``stock-vllm:chunk=16``, ``aligned-megatron:tp=2,mode=one`` or a recording's directory.

    Raises InputError naming the invalid part.
    """
    name, _, settings = text.partition(":")
    if name not in ENGINES:
        if (Path(text) / recording.JSON).is_file():
            return Side(text, directory=Path(text))
        raise InputError(
            f"side: expected one of {', '.join(ENGINES)} or a directory with a {recording.JSON}, got {text!r:.200}"
        )
    engine, patched = ENGINES[name]
    side = Side(text, engine, patched)
    forms = {
        "tp=N": engine != "hf",
        "chunk=N": engine == "vllm",
        "batch_invariant=1": name == "stock-vllm",
        "mode=MODE": engine != "vllm",
    }
    known = {form.partition("=")[0]: form for form, supported in forms.items() if supported}
    for setting in filter(None, settings.split(",")):
        key, separator, value = setting.partition("=")
        if key not in known:
            raise InputError(
                f"side: {text}: {name} has no setting {key!r:.80}. Its settings: {', '.join(known.values())}."
            )
        if not separator:
            raise InputError(f"side: {text}: {key}: expected {known[key]}, got {setting!r}")
        if key == "mode":
            modes = [mode for mode in MODES if mode != "packed" or name == "aligned-megatron"]
            if value not in modes:
                raise InputError(f"side: {text}: mode: must be {' or '.join(modes)} for {name}, got {value!r:.80}")
            side.mode = value
        elif key == "batch_invariant":
            if value != "1":
                raise InputError(f"side: {text}: batch_invariant: must be 1 or omitted, got {value!r:.80}")
            side.batch_invariant = True
        else:
            if not value.isdecimal() or not 0 < int(value) < 2**20:
                raise InputError(f"side: {text}: {key}: must be an integer in [1, 2^20), got {value!r}")
            setattr(side, key, int(value))
    return side


@dataclass
class Options:
    """Options of a bisection.

    Attributes:
        a: First side, as accepted by `parse_side`.
        b: Second side, as accepted by `parse_side`.
        out: Output directory.
        model: HF checkpoint directory. None generates a small random model of family `arch`.
        arch: Family of the generated model, such as "qwen3", "qwen2" or "llama".
        dtype: "bfloat16" or "float32".
        tokens: Logprob file or replay file whose sequences (prompt and sampled tokens) are run. None generates random
            sequences.
        decode: Number of tokens that the first vLLM side samples after each sequence, in [0, 4096]. vLLM computes
            these tokens in decode steps.
        swap: Op from `points.OPS` that alignkit computes on every stock side, in an additional run.
        budget: Maximum size of the recorded values per side, in bytes.
        seed: Seed of weights, tokens and sampling, in [0, 2^32).
        timeout: Time limit of one engine process, in seconds.
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
        for name in ("out", "model", "tokens"):  # accept strings as paths
            if isinstance(path := getattr(self, name), str):
                setattr(self, name, Path(path))


@dataclass
class Result:
    """Result of a bisection.

    Attributes:
        a: Recording of the first side.
        b: Recording of the second side.
        names: The two sides as written in `Options`.
        comparison: Comparison of the two recordings.
        swap: Op that alignkit computed in the additional run, or None.
        swapped: Comparison of the additional run, or None.
        info: Machine, versions, and the seconds of each engine.
    """

    a: Recording
    b: Recording
    names: tuple[str, str]
    comparison: Comparison
    swap: str | None
    swapped: Comparison | None
    info: dict = field(default_factory=dict)

    @property
    def confirmed(self) -> bool | None:
        """True if swapping the op removes the first difference; None without a swap or a difference."""
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
    """Run both sides, compare them and write ``bisect.json`` and the recordings into `options.out`.

    The first run records digests of all points. If a point differs, a second run records values within the budget; it
    must reproduce the bits of the first run. If the budget holds all values, the first run records them instead.

    Args:
        options: Sides, inputs and limits.
        progress: Receiver of progress events; None for silent.

    Returns:
        Both recordings and their comparison.

    Raises:
        InputError: An option, file or recording is invalid, or the sides are not comparable.
        UnsupportedError: An engine is not installed, or does not support the model or option.
        WorkerError: An engine process fails, times out or is not deterministic.
    """
    started = time.monotonic()
    progress = progress or Progress()
    sides = [parse_side(options.a), parse_side(options.b)]
    _check(options, sides)
    recordings = {i: recording.load(side.directory) for i, side in enumerate(sides) if side.directory}
    arch = _model_of(options, sides)
    sequences = _sequences(options, sides, recordings, arch)
    prepare(options.out, FILES, FOLDERS, "bisect")
    out = options.out.resolve()
    weights, model = next(iter(recordings.values())).weights if recordings else "", options.model
    if len(recordings) < 2:
        model = (
            options.model
            or make_checkpoint(
                out / "model", options.arch, getattr(torch, options.dtype), seed=options.seed, vocab=VOCAB
            )
        ).resolve()
        _check_sides(options, sides, read_architecture(model))
        weights = recording.weights_digest(model)
        for i, one in recordings.items():
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
    seconds, _ = execute(jobs.first(everything) + jobs.swapped(), out, options.timeout, progress)
    a, b = (recordings.get(i) or recording.load(jobs.directory("recordings", i)) for i in range(2))
    comparison = compare(a, b)
    keep = {} if everything else choose(comparison, a, options.budget)
    if keep and len(recordings) < 2:
        more, _ = execute(jobs.values(keep), out, options.timeout, progress)
        seconds |= more
        for i, side in enumerate((a, b)):
            if i not in recordings:
                _take_values(sides[i].name, side, recording.load(jobs.directory("values", i)))
        add_values(comparison, a, b)
    swapped = None
    if options.swap:
        swapped = compare(
            *((a, b)[i] if not sides[i].stock else recording.load(jobs.directory("swapped", i)) for i in range(2))
        )
    info = machine() | {"seconds": seconds | {"all": round(time.monotonic() - started, 1)}}
    result = Result(a, b, (options.a, options.b), comparison, options.swap, swapped, info)
    write_json(out / "bisect.json", result.to_json())
    return result


def _check(options: Options, sides: list[Side]) -> None:
    """Validate all options that need neither the model nor a recording."""
    for side in sides:
        if side.engine:
            name, module = _MODULES[side.engine]
            if not installed(module):
                raise UnsupportedError(f"{side.name} requires {name}, which is not installed. {INSTALL[module]}")
            if problem := no_room(side.tp):
                raise InputError(f"side: {side.name}: tp: {problem}")
            if side.batch_invariant and not gpus():
                raise UnsupportedError(f"side: {side.name}: batch_invariant: requires a GPU, got none")
        elif options.out.exists() and options.out.resolve() in side.directory.resolve().parents:
            raise InputError(f"out: must not contain the input recording {side.directory}, got {options.out}")
    if options.dtype not in DTYPES:
        raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, got {options.dtype!r}")
    if options.swap is not None:
        if options.swap not in OPS:
            raise InputError(f"swap: expected one of {', '.join(OPS)}, got {options.swap!r}")
        if not any(side.stock for side in sides):
            raise InputError(
                "swap: at least one side must be a stock engine (stock-vllm, stock-megatron or hf), got "
                f"{options.a} and {options.b}"
            )
    if not 0 <= options.decode <= 4096:
        raise InputError(f"decode: must be in [0, 4096], got {options.decode}")
    if options.decode:
        decoding = next((side for side in sides if side.engine == "vllm"), None)
        if decoding is None:
            raise InputError(
                "decode: must be 0 if no side is a vLLM engine, because only vLLM samples tokens, got "
                f"{options.decode} for {options.a} and {options.b}"
            )
        if any(side.directory for side in sides):
            raise InputError(
                "decode: must be 0 if a side is a recording, because vLLM would sample other tokens than the recorded "
                f"ones, got {options.decode}"
            )
        if options.swap and decoding.stock:
            raise UnsupportedError(
                f"decode: must be 0 with swap if {decoding.name} samples the tokens, because the swapped engine could "
                f"sample other tokens, got {options.decode}"
            )
    require_environment()
    if options.budget < 2**16:
        raise InputError(f"budget: must be at least {2**16} bytes, got {options.budget}")
    if not 0 <= options.seed < 2**32:
        raise InputError(f"seed: must be in [0, 2^32), got {options.seed}")
    if not options.timeout > 0:
        raise InputError(f"timeout: must be positive, got {options.timeout}")
    if options.model is None and any(side.directory for side in sides) and any(side.engine for side in sides):
        raise InputError(
            "model: must be the checkpoint of the recording if the other side is an engine, got none. A run of "
            "alignkit bisect without --model writes its checkpoint to OUT/model, beside OUT/recordings."
        )
    check_out(options.out, "bisect")


def _model_of(options: Options, sides: list[Side]) -> Architecture | None:
    """Return the architecture of the model after checking that the engines support it; None without a model."""
    if options.model is None:
        return None
    arch = read_architecture(options.model)
    _check_sides(options, sides, arch)
    check_weights(arch, Checkpoint(options.model))
    return arch


def _check_sides(options: Options, sides: list[Side], arch: Architecture) -> None:
    """Raise if an engine, the recorder or the swap does not support the model."""
    for side in sides:
        if side.engine:
            arch.check_tp(side.tp)
        if arch.experts and side.engine == "hf":
            raise UnsupportedError(f"model: must be dense for side {side.name}, got the MoE family {arch.family}")
    if arch.score != "softmax":
        raise UnsupportedError(
            f"model: an MoE model must have a softmax router for bisect, got {arch.score} ({arch.family})"
        )
    if arch.dense_layers:
        raise UnsupportedError(
            "model: an MoE model must have experts in all layers for bisect, got dense layers "
            f"{', '.join(map(str, sorted(arch.dense_layers)))} ({arch.family})"
        )
    if arch.experts and options.swap is not None:
        raise UnsupportedError(f"swap: must be omitted for MoE models ({arch.family}), got {options.swap}")


def _sequences(
    options: Options, sides: list[Side], recordings: dict[int, Recording], arch: Architecture | None
) -> list[list[int]]:
    source = "tokens"
    if options.tokens is not None:
        source = f"tokens: {options.tokens}"
        sequences, replay = tokens.read(options.tokens)
        if replay is not None:
            tokens.check_contract(options.tokens, replay, any(side.engine and not side.stock for side in sides))
        for i, one in recordings.items():
            if one.sequences != sequences:
                raise InputError(
                    f"{source}: the sequences must equal the sequences of the recording {sides[i].directory}. "
                    "Omit --tokens to run the recorded sequences."
                )
    elif recordings:
        sequences = next(iter(recordings.values())).sequences
    else:
        sequences = draw_prompts(arch.vocab if arch else VOCAB, options.seed, LENGTHS)
    if not sequences:
        raise InputError(f"{source}: must have at least one sequence, got none")
    if not all(sequences):
        raise InputError(f"{source}: sequence {sequences.index([])}: must have at least one token id, got none")
    first: dict[tuple[int, ...], int] = {}
    for i, sequence in enumerate(sequences):
        if (equal := first.setdefault(tuple(sequence), i)) != i:
            raise InputError(
                f"{source}: sequences must be distinct, but sequences {equal} and {i} are equal. Remove one of them."
            )
    if len(recordings) < 2:
        vocab, positions = (arch.vocab, arch.positions) if arch else (VOCAB, MAX_POSITION)
        largest = max(map(max, sequences))
        if largest >= vocab:
            i = next(i for i, sequence in enumerate(sequences) if largest in sequence)
            raise InputError(
                f"{source}: sequence {i}: token ids must be below the model's vocabulary size {vocab}, got {largest}"
            )
        longest, most = max(map(len, sequences)), positions - options.decode - 1
        if longest > most:
            i = next(i for i, sequence in enumerate(sequences) if len(sequence) == longest)
            raise InputError(
                f"{source}: sequence {i}: must have at most {most} tokens (the model's {positions} positions minus "
                f"decode = {options.decode} minus 1), got {longest}"
            )
    return sequences


def _check_given(side: Side, one: Recording, arch: Architecture, weights: str) -> None:
    expected = Recording("", STOCK, vars(arch), weights, one.sequences, {}, {}, {}, {})
    try:
        check_comparable(one, expected, ("recording", "model"))
    except InputError as e:
        raise InputError(f"{side.directory}: the recording must be of the checkpoint in --model: {e}") from None


def _take_values(name: str, side: Recording, again: Recording) -> None:
    """Copy the values of the second run into `side`; raise WorkerError unless it reproduced the first run's bits."""
    if side.sequences != again.sequences:
        raise WorkerError(f"{name}: the engine must be deterministic, but its second run sampled other tokens")
    for point, rows in again.kept.items():
        if (side.digests[point][rows] != again.digests[point][rows]).any():
            raise WorkerError(
                f"{name}: the engine must be deterministic, but its second run computed other bits at {point}"
            )
        if point not in side.values:
            side.values[point], side.kept[point] = again.values[point], rows


class _Jobs:
    """Factory of the engine jobs of a bisection."""

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
        assert side.engine is not None  # recordings have no job
        run = {"out": str(self.directory(kind, i) / recording.JSON)}
        needs = []
        decode = self._options.decode if i == self._decoding else 0
        if self._decoding is not None and not decode:
            run["in"] = str(self.directory("recordings", self._decoding) / recording.JSON)
            needs = [Path(run["in"])] if kind != "values" else []  # exists after the first run
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
