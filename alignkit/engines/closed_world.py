"""Uses of an engine's names: the files of a package that refer to a name that alignkit replaces.

A hook point says that a name exists. That is not enough: a new caller of a replaced function, or a second import of it,
would bypass the replacement while every hook point resolves. So all users of such a name must be known.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from .hook_points import Trees


def users(root: Path, names: Collection[str], trees: Trees | None = None) -> dict[str, frozenset[str]]:
    """Return for each name the files below `root`, relative to it, whose code refers to the name.

    A reference is an identifier, an attribute, an import, a definition, or a string that equals the name, as in
    ``getattr``. Comments and other strings do not count.
    """
    trees = trees or Trees()
    found: dict[str, set[str]] = {name: set() for name in names}
    sought = [name.encode() for name in names]
    for path in sorted(root.rglob("*.py")) if names else ():
        content = path.read_bytes()
        if any(name in content for name in sought):
            file = path.relative_to(root).as_posix()
            for name in found.keys() & _words(trees.of(path)):
                found[name].add(file)
    return {name: frozenset(files) for name, files in found.items()}


def unknown_users(root: Path, known: Mapping[str, Iterable[str]], trees: Trees | None = None) -> list[str]:
    """Return a sentence for each name of `known` that files other than its known ones refer to."""
    problems = []
    for name, files in users(root, known, trees).items():
        if others := sorted(files - {*known[name]}):
            problems.append(f"{name}: is also used in {', '.join(others)}")
    return problems


def _words(tree: ast.Module) -> set[str]:
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.alias):
            words |= {node.name.rpartition(".")[2], node.asname or ""}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            words.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
    return words
