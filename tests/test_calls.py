"""Tests that need a GPU are skipped elsewhere; what they call of alignkit must take their arguments all the same."""

import ast
import contextlib
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
)


def member(module: str, name: str) -> object:
    found = importlib.import_module(module)
    return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")


def imported(tree: ast.AST) -> dict[str, object]:
    """What a file imports of alignkit, at its top or inside functions, by the names it has there."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "alignkit":
            for alias in node.names:
                with contextlib.suppress(ImportError):  # of an engine that is not installed
                    found[alias.asname or alias.name] = member(node.module, alias.name)
    return found


def calls(tree: ast.AST, names: dict[str, object]) -> Iterator[tuple[ast.Call, object]]:
    """Calls of functions and classes of `names`, or of their members, whose arguments are all written out."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(isinstance(a, ast.Starred) for a in node.args):
            continue
        if any(keyword.arg is None for keyword in node.keywords):
            continue
        path, at = [], node.func
        while isinstance(at, ast.Attribute):
            path.insert(0, at.attr)
            at = at.value
        if not isinstance(at, ast.Name) or at.id not in names:
            continue
        called = names[at.id]
        for name in path:
            called = getattr(called, name, None)
        if inspect.isfunction(called) or inspect.isclass(called):
            yield node, called


def misfits(source: str) -> list[str]:
    tree, found = ast.parse(source), []
    for node, called in calls(tree, imported(tree)):
        with contextlib.suppress(ValueError):  # a class of Python's own, which has no signature
            signature = inspect.signature(called)
            try:
                signature.bind(*node.args, **{k.arg: k.value for k in node.keywords})
            except TypeError as e:
                found.append(f"line {node.lineno}: {called.__qualname__}: {e}")
    return found


@pytest.mark.parametrize("file", FILES)
def test_arguments_fit(file):
    assert not misfits((ROOT / file).read_text())


def test_a_missing_argument_is_noticed():
    assert misfits("def test():\n    from alignkit.ops import rms_norm\n    rms_norm(1)") == [
        "line 3: rms_norm: missing a required argument: 'weight'"
    ]
    assert misfits("from alignkit import ops\nops.silu_mul(1, 2, 3)") == [
        "line 2: silu_mul: too many positional arguments"
    ]
