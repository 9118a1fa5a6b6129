"""Names in an engine's sources that an adapter subclasses, replaces or calls, looked up without importing the engine.

They are resolved in the syntax trees of a package directory, installed or of an unpacked wheel: a version can be
checked on a machine that cannot run it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Seam:
    """A name that must exist.

    file: path below the engine's package. name: dotted name in that file, of a definition or of an import.
    accepts: parameters that the function, or the class's `__init__`, must take.
    mentions: words that its source must have in it: what it calls.
    """

    file: str
    name: str
    accepts: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()


def unresolved(root: Path, seams: Iterable[Seam]) -> list[str]:
    """The `seams` that the package directory `root` lacks, each with the reason."""
    trees: dict[Path, ast.Module] = {}
    problems = []
    for seam in seams:
        path = root / seam.file
        if path.is_file() and path not in trees:
            trees[path] = ast.parse(path.read_text(encoding="utf-8"))
        problem = _problem(trees[path], seam) if path in trees else "no such file"
        if problem:
            problems.append(f"{seam.file}: {seam.name}: {problem}")
    return problems


def find(scope: Any, name: str) -> Any:
    """What `name` is bound to in a module or class body, in branches of it too; the last binding counts."""
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


def _problem(tree: ast.Module, seam: Seam) -> str | None:
    scope: ast.AST | None = tree
    *outer, last = seam.name.split(".")
    for name in outer:
        scope = find(scope, name)
        if not isinstance(scope, ast.ClassDef):
            return f"no class {name}"
    found = find(scope, last)
    if found is None:
        return "not found"
    words = {getattr(node, "attr", getattr(node, "id", None)) for node in ast.walk(found)}
    if lacking := [word for word in seam.mentions if word not in words]:
        return f"has no {', '.join(lacking)} in it"
    if isinstance(found, ast.ClassDef) and seam.accepts:
        found = find(found, "__init__")
        if found is None:
            return "no __init__"
    if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = found.args
        names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        if lacking := [a for a in seam.accepts if a not in names]:
            return f"does not take {', '.join(lacking)}"
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            for branch in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, branch, []))
