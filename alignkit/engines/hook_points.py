"""Hook points: names in an engine's sources that an adapter subclasses, replaces or calls.

Hook points are resolved in the syntax trees of a package directory, installed or from an unpacked wheel. The engine is
not imported, so a machine that cannot run a version can still check it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class HookPoint:
    """A name that must exist in an engine's sources.

    file: path below the engine's package. name: dotted name of a definition or an import in that file.
    accepts: parameters that the function, or the class's `__init__`, must accept.
    mentions: identifiers that its source must contain, such as the functions it calls.
    """

    file: str
    name: str
    accepts: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()


def unresolved(root: Path, hook_points: Iterable[HookPoint]) -> list[str]:
    """Return the `hook_points` that the package directory `root` lacks, each with the reason."""
    trees: dict[Path, ast.Module] = {}
    problems = []
    for hook_point in hook_points:
        path = root / hook_point.file
        if path.is_file() and path not in trees:
            trees[path] = ast.parse(path.read_text(encoding="utf-8"))
        problem = _problem(trees[path], hook_point) if path in trees else "no such file"
        if problem:
            problems.append(f"{hook_point.file}: {hook_point.name}: {problem}")
    return problems


def find(scope: Any, name: str) -> Any:
    """Return the last statement that binds `name` in a module or class body, branches included, or None."""
    found = None
    for node in _statements(scope.body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            bound = [node.name]
        elif isinstance(node, ast.Assign):
            bound = [t.id for t in node.targets if isinstance(t, ast.Name)]
        elif isinstance(node, ast.AnnAssign):
            bound = [node.target.id] if isinstance(node.target, ast.Name) else []
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound = [a.asname or a.name for a in node.names]
        else:
            continue
        if name in bound:
            found = node
    return found


def _problem(tree: ast.Module, hook_point: HookPoint) -> str | None:
    scope: ast.AST | None = tree
    *outer, last = hook_point.name.split(".")
    for name in outer:
        scope = find(scope, name)
        if not isinstance(scope, ast.ClassDef):
            return f"no class {name}"
    found = find(scope, last)
    if found is None:
        return "not found"
    words = {getattr(node, "attr", getattr(node, "id", None)) for node in ast.walk(found)}
    if lacking := [word for word in hook_point.mentions if word not in words]:
        return f"its source does not contain {', '.join(lacking)}"
    if isinstance(found, ast.ClassDef) and hook_point.accepts:
        found = find(found, "__init__")
        if found is None:
            return "no __init__"
    if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = found.args
        names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        if lacking := [a for a in hook_point.accepts if a not in names]:
            return f"does not take {', '.join(lacking)}"
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            for branch in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, branch, []))
