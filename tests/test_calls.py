"""Static check that calls of alignkit in tests, benchmarks and examples match its signatures.

It reads the syntax trees, so a CPU machine finds wrong calls in GPU-only code too.
"""

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
    """Return the alignkit objects that a file imports, at its top or inside functions, by local name."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "alignkit":
            for alias in node.names:
                with contextlib.suppress(ImportError):  # its engine is not installed
                    found[alias.asname or alias.name] = member(node.module, alias.name)
    return found


def calls(tree: ast.AST, names: dict[str, object]) -> Iterator[tuple[ast.Call, object]]:
    """Yield calls of functions and classes in `names`, or of their members, that use no * or ** arguments."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(isinstance(a, ast.Starred) for a in node.args):
            continue
        if any(keyword.arg is None for keyword in node.keywords):
            continue
        path, value = [], node.func
        while isinstance(value, ast.Attribute):
            path.insert(0, value.attr)
            value = value.value
        if not isinstance(value, ast.Name) or value.id not in names:
            continue
        called = names[value.id]
        for name in path:
            called = getattr(called, name, None)
        if inspect.isfunction(called) or inspect.isclass(called):
            yield node, called


def misfits(source: str) -> list[str]:
    tree, found = ast.parse(source), []
    for node, called in calls(tree, imported(tree)):
        with contextlib.suppress(ValueError):  # a built-in class without a signature
            signature = inspect.signature(called)
            try:
                signature.bind(*node.args, **{k.arg: k.value for k in node.keywords})
            except TypeError as e:
                found.append(f"line {node.lineno}: {called.__qualname__}: {e}")
    return found


@pytest.mark.parametrize("file", FILES)
def test_calls_match_the_signatures(file):
    assert not misfits((ROOT / file).read_text())


def test_missing_and_extra_arguments_are_detected():
    assert misfits("def test():\n    from alignkit.ops import rms_norm\n    rms_norm(1)") == [
        "line 3: rms_norm: missing a required argument: 'weight'"
    ]
    assert misfits("from alignkit import ops\nops.silu_mul(1, 2, 3)") == [
        "line 2: silu_mul: too many positional arguments"
    ]
