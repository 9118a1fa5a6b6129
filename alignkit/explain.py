"""`alignkit explain`: the kernel that computes a problem, and the reasons against the others.

The answer comes from `runtime.dispatch`, as for a call, but the problem is described in words instead of by tensors.
This requires neither a GPU nor the device family's library. The ops' records (ops/<op>/op.py) build the problems.
docs/architecture.md shows the output, and tests/cli/test_explain.py reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .errors import BackendError, InputError
from .ops.registry import RECORDS
from .ops.words import MEANINGS, Words
from .runtime import dispatch, families

DESCRIBED: dict[str, Callable[[str, Words], Any]] = {
    op: function for record in RECORDS for op, function in record.described.items()
}
"""Op -> function that builds the problem; ops whose kernel depends on the problem."""


def explain(op: str, words: Sequence[str]) -> Iterator[str]:
    """Yield lines of text that explain the choice of a kernel.

    Args:
        op: A key of `dispatch.OPS`, or "list" for the names that each op takes.
        words: The problem, as ``name=value`` words such as ``rows=64``.

    Raises:
        InputError: If the op is unknown, or the words are not the ones that the op takes.
        BackendError: If the kernels of the device family cannot be imported.
    """
    if op == "list":
        for name in dispatch.OPS:
            required, optional = _names(name)
            yield f"{name:<20} {', '.join(required) or 'none required'}; optional: {', '.join(optional)}"
        yield ""
        yield from (f"{name:<12} {meaning}" for name, meaning in MEANINGS.items())
        return
    parts = [name for name, folder in dispatch.OPS.items() if folder == dispatch.OPS.get(op, op) and name in DESCRIBED]
    if op not in dispatch.OPS and parts:
        raise InputError(f"op: must be one of the parts of {op} ({', '.join(parts)}), got {op!r}")
    given = Words(words)
    family = families.BY_NAME[given.one_of("family", tuple(families.BY_NAME), families.SM90.name)]
    backend = given.one_of("backend", family.backends, family.backends[0])
    dispatch.order(op)  # raises InputError for an unknown op
    problem = _described(op, backend, given) if op in DESCRIBED else None
    given.reject_unused(op)
    yield f"{op}: " + " ".join(f"{name}={value}" for name, value in given.used.items())
    try:
        refusals = [(kernel, kernel.rejects(problem)) for kernel in dispatch.kernels(op, backend)]
    except ImportError as e:
        raise BackendError(f"family: the kernels of {family.name} cannot be imported: {e}") from e
    chosen = None
    for kernel, why in refusals:
        name = f"{kernel.name:<10}"
        if why is not None:
            yield f"  skipped     {name} {why}"
        elif chosen is None:
            yield f"  selected    {name} {kernel.load().__name__}" + (
                f", unless {kernel.declines}" if kernel.declines else ""
            )
        else:
            yield f"  also valid  {name} " + (
                f"used if {chosen.name}'s trial fails" if chosen.declines else f"slower than {chosen.name}"
            )
        if why is None and (chosen is None or chosen.declines):
            chosen = kernel
    if problem is None and parts:
        yield f"  the kernels of these parts depend on the problem: {', '.join(parts)}"


def _described(op: str, backend: str, given: Words) -> Any:
    try:
        problem = DESCRIBED[op](backend, given)
    except InputError:
        if not given.missing:
            raise
    except RuntimeError as e:  # torch rejects the shape
        raise InputError(f"{op}: the sizes must be those of a possible tensor: {str(e).splitlines()[0]}") from None
    else:
        if not given.missing:
            return problem
    required, optional = _names(op)
    raise InputError(
        f"{', '.join(given.missing)}: required, for example {given.missing[0]}=64. {op} requires "
        f"{', '.join(required)}; optional names: {', '.join(optional)}"
    )


def _names(op: str) -> tuple[list[str], list[str]]:
    """Return the names that an op requires, and the names that have a default."""
    words = Words([])  # all values are placeholders or defaults
    if op in DESCRIBED:
        DESCRIBED[op](families.SM90.backends[0], words)
    return words.missing, [*(name for name in words.used if name not in words.missing), "family", "backend"]
