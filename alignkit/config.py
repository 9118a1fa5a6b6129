"""Every environment variable that alignkit reads: its name, the words it takes, its default and what it means.

They are read through one object: ``config.strict`` is what ``ALIGNKIT_STRICT`` says at that moment. Nothing is kept here;
where an answer is kept, the variable's `when` says so. docs/configuration.md lists the same table.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from .errors import AlignkitError, BackendError, InputError

T = TypeVar("T")
YES = ("1", "on", "true", "yes")
NO = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """A variable of the environment; as an attribute of `config`, what it says."""

    name: str
    allowed: tuple[str, ...]
    """The words it takes; of what is no list of words, a description in angle brackets."""
    parse: Callable[[str], T | None]
    """Its value from a word without space around it; None: that word is not allowed."""
    default: T
    """Where it is unset, or empty and `parse` does not take that."""
    meaning: str
    when: str
    """When it is read."""
    workers: bool = True
    """Whether all processes of an engine must have it alike."""
    refusal: str = ""
    """How a word that is not allowed is refused, after "is"; by default the allowed words are listed."""
    error: type[AlignkitError] = InputError

    @overload
    def __get__(self, config: None, owner: type) -> Variable[T]: ...
    @overload
    def __get__(self, config: Config, owner: type) -> T: ...
    def __get__(self, config: Config | None, owner: type) -> Variable[T] | T:
        return self if config is None else self.read()

    def read(self) -> T:
        """What it says now. Raises `error`, which names it and the words that it takes."""
        given = os.environ.get(self.name)
        return self.default if given is None else self.of(given)

    def of(self, given: str) -> T:
        """What `given` says, as `read` does."""
        value = self.parse(given.strip())
        if value is None:
            refusal = self.refusal or f"none of {', '.join(self.allowed)}"
            raise self.error(f"{self.name}: {given!r} is {refusal}")
        return value


def _flag(name: str, default: bool, meaning: str, when: str) -> Variable[bool]:
    words = dict.fromkeys(YES, True) | dict.fromkeys(NO, False) | {"": default}
    return Variable(
        name,
        (*YES, *NO),
        lambda word: words.get(word.lower()),
        default,
        meaning,
        when,
        refusal=f"neither of {', '.join(YES)} nor of {', '.join(NO)}",
    )


def _word(name: str, allowed: tuple[str, ...], default: str, meaning: str, when: str) -> Variable[str]:
    words = {word: word for word in allowed} | {"": default}
    return Variable(name, allowed, words.get, default, meaning, when, error=BackendError)


def _text(name: str, what: str, default: str, meaning: str, when: str, workers: bool = True) -> Variable[str]:
    return Variable(name, (f"<{what}>",), lambda word: word or default, default, meaning, when, workers)


def _seconds(word: str) -> float | None:
    try:
        seconds = float(word)
    except ValueError:
        return None
    return seconds if 0 < seconds < 1e9 else None


class Config:
    """alignkit's variables, then those of others that it reads."""

    backend = _word(
        "ALIGNKIT_BACKEND",
        ("auto", "cpu", "reference", "triton", "cuda"),
        "auto",
        "The backend that ops run on; auto takes the fastest of the tensors' device. All of one device family give the "
        "same bits.",
        "when an op is first called, then kept",
    )
    cpu_isa = _word(
        "ALIGNKIT_CPU_ISA",
        ("generic", "avx2", "avx512"),
        "",
        "The instruction set of the CPU kernels, by default the best of the machine. All give the same bits.",
        "when the CPU kernels are loaded, then kept",
    )
    strict = _flag(
        "ALIGNKIT_STRICT",
        False,
        "Values on a GPU are looked at before they are used, although that waits for it.",
        "in every call",
    )
    symmetric = _flag(
        "ALIGNKIT_SYMMETRIC",
        True,
        "Ranks add through memory that their GPUs read over NVLink, where there is such; else NCCL gathers.",
        "when a group of ranks first adds, then kept for the group",
    )
    symmetric_timeout = Variable(
        "ALIGNKIT_SYMMETRIC_TIMEOUT",
        ("<seconds>",),
        _seconds,
        None,
        "How long a rank waits in such a sum for another; by default as long as the group's collectives do.",
        "when a group of ranks first adds, then kept for the group",
        refusal="not a number of seconds between 0 and 1e9",
    )
    vllm = _flag(
        "ALIGNKIT_VLLM",
        False,
        "vLLM is aligned in each process where it loads its plugins. patch_vllm() sets it while it is in force.",
        "when vLLM loads its plugins",
    )
    ranks_per_gpu = Variable(
        "ALIGNKIT_RANKS_PER_GPU",
        ("<number>",),
        {"": 1, **{str(n): n for n in range(1, 9)}}.get,
        1,
        "How many ranks of an engine in the check and the benchmarks share a GPU, for a machine with fewer GPUs than ranks. "
        "NCCL 2.30 or later does so, with NCCL_MULTI_RANK_GPU_ENABLE=1: slow, but the same kernels and bits.",
        "when the check or a benchmark plans its engines",
        workers=False,
        refusal="not a number from 1 to 8",
    )
    commit = _text(
        "ALIGNKIT_COMMIT",
        "a commit",
        "",
        "Which commit reports name, where the checkout has no history with it.",
        "when a report is written",
        workers=False,
    )
    cache = _text(
        "XDG_CACHE_HOME",
        "a folder",
        "~/.cache",
        "Where it is remembered, in a folder alignkit, that the bits were tested with what is installed.",
        "when that is looked up",
    )
    ptxas = _text(
        "TRITON_PTXAS_PATH",
        "a file",
        "",
        "Triton's assembler, if not its own: the bits are tested with it first.",
        "when an op is first called on a GPU",
    )


config = Config()
VARIABLES: tuple[Variable[Any], ...] = tuple(v for v in vars(Config).values() if isinstance(v, Variable))


def refused_variables() -> list[str]:
    """Of each variable that is set to what it does not take, the error."""
    said = []
    for variable in VARIABLES:
        try:
            variable.read()
        except AlignkitError as e:
            said.append(str(e))
    return said


def require_variables() -> None:
    """Raises InputError for variables that are set to what they do not take: before engines are started, which would find out one
    by one, or never."""
    if said := refused_variables():
        raise InputError("; ".join(said))


def unknown(environment: dict[str, str] | os._Environ[str]) -> list[str]:
    """Names in it that begin as alignkit's do and are none: misspelt, or of its tests and benchmarks."""
    known = {v.name for v in VARIABLES}
    return sorted(name for name in environment if name.startswith("ALIGNKIT_") and name not in known)
