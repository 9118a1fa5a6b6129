"""Environment variables that alignkit reads: name, accepted values, default and meaning.

All are read through one object: ``config.strict`` is the current value of ``ALIGNKIT_STRICT``. This module caches
nothing; a variable's `when` says if its value is cached elsewhere. No variable changes the bits of an op.
docs/configuration.md lists the same table, and tests/test_config.py compares both.
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
"""Accepted words of boolean variables, in any case."""


@dataclass(frozen=True)
class Variable(Generic[T]):
    """An environment variable; as an attribute of `config`, its current value."""

    name: str
    allowed: tuple[str, ...]
    """Accepted words, or one description in angle brackets."""
    parse: Callable[[str], T | None]
    """Conversion of a stripped word to a value; None rejects the word."""
    default: T
    """Value if the variable is unset."""
    meaning: str
    when: str
    """Time at which the variable is read."""
    workers: bool = True
    """True if all processes of an engine must have the same value."""
    requirement: str = ""
    """Requirement in the error message for a rejected word; by default the list of accepted words."""
    error: type[AlignkitError] = InputError
    """Error class for a rejected word."""

    @overload
    def __get__(self, config: None, owner: type) -> Variable[T]: ...
    @overload
    def __get__(self, config: Config, owner: type) -> T: ...
    def __get__(self, config: Config | None, owner: type) -> Variable[T] | T:
        return self if config is None else self.read()

    def read(self) -> T:
        """Return the current value; raise `error` if the environment holds a rejected word."""
        given = os.environ.get(self.name)
        return self.default if given is None else self.of(given)

    def of(self, given: str) -> T:
        """Return the value of the string `given`; raise `error` if it is rejected."""
        value = self.parse(given.strip())
        if value is None:
            requirement = self.requirement or f"must be one of {', '.join(self.allowed)}"
            raise self.error(f"{self.name}: {requirement}, got {given!r}")
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
        requirement=f"must be a boolean ({'/'.join(YES)} or {'/'.join(NO)})",
    )


def _word(name: str, allowed: tuple[str, ...], default: str, meaning: str, when: str) -> Variable[str]:
    words = {word: word for word in allowed} | {"": default}
    return Variable(name, allowed, words.get, default, meaning, when, error=BackendError)


def _text(name: str, kind: str, default: str, meaning: str, when: str, workers: bool = True) -> Variable[str]:
    return Variable(name, (f"<{kind}>",), lambda word: word or default, default, meaning, when, workers)


def _seconds(word: str) -> float | None:
    try:
        seconds = float(word)
    except ValueError:
        return None
    return seconds if 0 < seconds < 1e9 else None


class Config:
    """The environment variables: alignkit's own, then those of other projects that alignkit reads."""

    backend = _word(
        "ALIGNKIT_BACKEND",
        ("auto", "cpu", "reference", "triton", "cuda"),
        "auto",
        "Backend of the ops; auto selects the fastest for the tensors' device. All backends of a device family give "
        "the same bits.",
        "at the first op call, then cached",
    )
    cpu_isa = _word(
        "ALIGNKIT_CPU_ISA",
        ("generic", "avx2", "avx512"),
        "",
        "Instruction set of the CPU kernels; by default the best that the machine supports. All give the same bits.",
        "when the CPU kernels are loaded, then cached",
    )
    strict = _flag(
        "ALIGNKIT_STRICT",
        False,
        "Validate input values on a GPU before use, which synchronizes with the device. Inspect the whole model in "
        "every step.",
        "in every call",
    )
    symmetric = _flag(
        "ALIGNKIT_SYMMETRIC",
        True,
        "Sum over tensor-parallel ranks through symmetric memory (NVLink) if available; otherwise NCCL gathers.",
        "at the first sum of a process group, then cached for the group",
    )
    symmetric_timeout = Variable(
        "ALIGNKIT_SYMMETRIC_TIMEOUT",
        ("<seconds>",),
        _seconds,
        None,
        "Longest time, in seconds, that a rank waits for another in such a sum; by default the group's collective "
        "timeout.",
        "at the first sum of a process group, then cached for the group",
        requirement="must be a number of seconds in (0, 1e9)",
    )
    vllm = _flag(
        "ALIGNKIT_VLLM",
        False,
        "Align vLLM in every process that loads vLLM's plugins. patch_vllm() sets it while the patch is active.",
        "when vLLM loads its plugins",
    )
    mixed_updates = _flag(
        "ALIGNKIT_MIXED_UPDATES",
        False,
        "Accept an update of vLLM's weights while requests are paused with their KV cache. Their further tokens have "
        "the epoch -1: their logprobs belong to no model.",
        "in every call that changes weights",
    )
    read_methods = _text(
        "ALIGNKIT_READ_METHODS",
        "names separated by commas",
        "",
        "Methods of your vLLM worker extension that change no weights. A call of any other one counts as an update.",
        "in every collective_rpc",
        workers=False,
    )
    ranks_per_gpu = Variable(
        "ALIGNKIT_RANKS_PER_GPU",
        ("<number>",),
        {"": 1, **{str(n): n for n in range(1, 9)}}.get,
        1,
        "Ranks of an engine that share a GPU in `alignkit check` and the benchmarks, for machines with fewer GPUs than "
        "ranks. Needs NCCL 2.30 or later with NCCL_MULTI_RANK_GPU_ENABLE=1: slow, but the same kernels and bits.",
        "when the check or a benchmark plans its engines",
        workers=False,
        requirement="must be an integer from 1 to 8",
    )
    commit = _text(
        "ALIGNKIT_COMMIT",
        "a commit",
        "",
        "Commit to name in reports if the checkout has no git history.",
        "when a report is written",
        workers=False,
    )
    cache = _text(
        "XDG_CACHE_HOME",
        "a folder",
        "~/.cache",
        "Folder for alignkit's cache: results of the golden-bits test for the installed versions.",
        "when the cache is read",
    )
    certificates = _text(
        "ALIGNKIT_CERTIFICATES",
        "a folder",
        "",
        "Folder of the certificates that `alignkit prove` writes; by default `alignkit/certificates` in the cache. "
        "Machines with equal keys may share it.",
        "when a version or GPU needs a proof",
    )
    proof = _text(
        "ALIGNKIT_PROOF",
        "a file",
        "",
        "Set by `alignkit prove` for the engines that it starts; it has no effect when that command has ended.",
        "when an engine is patched",
    )
    ptxas = _text(
        "TRITON_PTXAS_PATH",
        "a file",
        "",
        "Assembler that Triton uses instead of its bundled one; alignkit then tests the golden bits first.",
        "at the first op call on a GPU",
    )


config = Config()
VARIABLES: tuple[Variable[Any], ...] = tuple(v for v in vars(Config).values() if isinstance(v, Variable))


def invalid_variables() -> list[str]:
    """Return the error message of every variable with a rejected value."""
    messages = []
    for variable in VARIABLES:
        try:
            variable.read()
        except AlignkitError as e:
            messages.append(str(e))
    return messages


def require_variables() -> None:
    """Raise InputError if any variable has a rejected value.

    Call this before starting engines: each engine process reads only some variables, some of them late.
    """
    if messages := invalid_variables():
        raise InputError("; ".join(messages))


def unknown(environment: dict[str, str] | os._Environ[str]) -> list[str]:
    """Return the ALIGNKIT_* names in `environment` that the package does not read, e.g. misspelled ones."""
    known = {v.name for v in VARIABLES}
    return sorted(name for name in environment if name.startswith("ALIGNKIT_") and name not in known)
