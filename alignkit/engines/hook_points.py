"""Hook points: names in an engine's sources that an adapter subclasses, replaces or calls.

An adapter declares them where it uses them, by `replaces` and `relies_on`; `declared` reads the declarations, and the
adapter's imports of the engine, from the adapter's sources. `unresolved` resolves them in the syntax trees of a package
directory, installed or from an unpacked wheel. Neither the engine nor the adapter is imported, so a machine that cannot
run a version can still check it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class HookPoint:
    """A name that must exist in an engine's sources.

    file: path below the engine's package; without a suffix, that of a module or package. name: dotted name of a
    definition or an import in that file, or of a submodule.
    accepts: parameters that the function, or the class's `__init__`, must accept.
    mentions: identifiers that its source must contain, such as the functions it calls.
    """

    file: str
    name: str
    accepts: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()


class Trees:
    """Parsed files, each parsed once."""

    def __init__(self):
        self._trees: dict[Path, ast.Module] = {}

    def of(self, path: Path) -> ast.Module:
        """Return the syntax tree of a file."""
        if path not in self._trees:
            self._trees[path] = ast.parse(path.read_bytes())
        return self._trees[path]


def unresolved(root: Path, hook_points: Iterable[HookPoint], trees: Trees | None = None) -> list[str]:
    """Return the `hook_points` that the package directory `root` lacks, each with the reason."""
    trees = trees or Trees()

    def tree(file: str) -> ast.Module | None:
        path = root / file
        if not file.endswith(".py"):
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return trees.of(path) if path.is_file() else None

    def imports(file: str, name: str) -> bool:
        """Return whether `name` can be imported from a module: a submodule, or bound there or by a star import."""
        module = tree(file)
        if module is None or (root / file / name).is_dir() or (root / file / f"{name}.py").is_file():
            return module is not None
        stars = (n for n in module.body if isinstance(n, ast.ImportFrom) and n.level == 1 and n.names[0].name == "*")
        return find(module, name) is not None or any(imports(f"{file}/{star.module}", name) for star in stars)

    problems = []
    for hook_point in hook_points:
        file, name = hook_point.file, hook_point.name
        module = tree(file)
        if module is None:
            problem = "no such file"
        elif hook_point == HookPoint(file, name) and not file.endswith(".py") and "." not in name:
            problem = None if imports(file, name) else "not found"
        else:
            problem = _problem(module, hook_point)
        if problem:
            problems.append(f"{file}: {name}: {problem}")
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


def replaces(where: str = "", accepts: str = "", *, mentions: str = "", when: str = "") -> Callable[[T], T]:
    """Declare the engine's function that a method or function replaces, as a decorator.

    The engine's function must accept the parameters of the decorated method. Arguments are literals, because
    `declared` reads them from the source.

    Args:
        where: ``file:name`` of the engine's function. The default is the method of the same name of the engine's class
            that the decorated method's class derives from.
        accepts: Parameters, separated by spaces, instead of those of the decorated method.
        mentions: Identifiers that the function's source must contain, separated by spaces.
        when: Feature of the versions that have the function, as in the adapter's `versions`; "" for all versions.
    """
    return lambda replacement: replacement


def relies_on(where: str, accepts: str = "", *, members: str = "", mentions: str = "", when: str = "") -> Any:
    """Declare a name of the engine that the adapter calls or reads, as a decorator or a statement.

    Args:
        where: ``file:name``.
        accepts: Parameters that a function, or the class's `__init__`, must accept, separated by spaces.
        members: Names in the class `where` that the adapter relies on instead, separated by spaces.
        mentions: Identifiers that its source must contain, separated by spaces.
        when: Feature of the versions that have the name, as in the adapter's `versions`; "" for all versions.
    """
    return lambda user: user


def declared(adapter: Path, engine: str) -> dict[str, list[HookPoint]]:
    """Return the hook points of an adapter by feature ("" for all versions), read from its sources.

    Hook points are the declarations of `replaces` and `relies_on`, the imported names of `engine`, and the names that
    are read as attributes of an imported module. Imports in conditions and in ``try`` are left out: not every version
    has them. Those of a function with a declaration belong to the declaration's feature.

    Args:
        adapter: The adapter's folder.
        engine: The engine's package, such as "megatron.core".
    """
    found: dict[str, list[HookPoint]] = {"": []}
    for path in sorted(adapter.glob("*.py")):
        reader = _Reader(engine, found)
        reader.read(ast.parse(path.read_text(encoding="utf-8")).body)
    return {when: list(dict.fromkeys(hook_points)) for when, hook_points in found.items()}


class _Reader:
    """Reader of one file of an adapter. found: feature -> hook points, extended by the file's."""

    def __init__(self, engine: str, found: dict[str, list[HookPoint]]) -> None:
        self._engine, self._found = engine, found
        self._names: dict[str, tuple[str, str]] = {}
        """Imported name -> (file without suffix, name in the file)."""

    def read(self, body: list[ast.stmt], when: str = "", base: tuple[str, str] | None = None) -> None:
        """Read statements. base: the engine's class that the statements' class derives from."""
        for node in body:
            if isinstance(node, (ast.ImportFrom, ast.Import)):
                self._read_import(node, when)
            elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                declared_for = {self._declare(c, node, base) for c in map(_declaration, node.decorator_list) if c}
                own = declared_for.pop() or when if len(declared_for) == 1 else when
                derived = (self._origin(b) for b in node.bases) if isinstance(node, ast.ClassDef) else ()
                self._attributes([*getattr(node, "bases", ()), *node.decorator_list], own)
                self.read(node.body, own, next(filter(None, derived), None))
            elif not isinstance(node, (ast.If, ast.Try)):
                if isinstance(node, ast.Expr) and (call := _declaration(node.value)):
                    self._declare(call, node, base)
                self._attributes([node], when)
                for branch in ("body", "orelse"):
                    self.read(getattr(node, branch, []), when, base)

    def _read_import(self, node: ast.ImportFrom | ast.Import, when: str) -> None:
        module = getattr(node, "module", None) or ""
        if module == self._engine or module.startswith(f"{self._engine}."):
            file = module.removeprefix(self._engine).strip(".").replace(".", "/")
            for alias in node.names:
                self._names[alias.asname or alias.name] = file, alias.name
                self._add(HookPoint(file, alias.name), when)

    def _attributes(self, nodes: list[Any], when: str) -> None:
        for node in (inner for outer in nodes for inner in ast.walk(outer)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and (found := self._origin(node)):
                self._add(HookPoint(*found), when)

    def _origin(self, node: ast.expr) -> tuple[str, str] | None:
        """Return file and name of an imported name, or of an attribute of an imported module (lower case)."""
        if isinstance(node, ast.Subscript):
            return self._origin(node.value)
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            file, name = self._names.get(node.value.id, ("", ""))
            return (f"{file}/{name}".strip("/"), node.attr) if name.islower() else None
        return None

    def _declare(self, call: ast.Call, node: ast.AST, base: tuple[str, str] | None) -> str:
        given = {"accepts": "", "members": "", "mentions": "", "when": ""}
        given |= dict(zip(("where", "accepts"), map(ast.literal_eval, call.args), strict=False))
        given |= {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        file, _, name = given.get("where", "").partition(":")
        accepts = tuple(given["accepts"].split())
        if getattr(call.func, "id", "") == "replaces" and isinstance(node, ast.FunctionDef):
            if not name and base is not None:
                file, name = base[0], f"{base[1]}.{node.name}"
            own = (a.arg for a in (*node.args.args, *node.args.kwonlyargs) if a.arg not in ("self", "cls"))
            accepts = accepts or tuple(own)
        for member in given["members"].split() or [""]:
            dotted = f"{name}.{member}" if member else name
            self._add(HookPoint(file, dotted, accepts, tuple(given["mentions"].split())), given["when"])
        return given["when"]

    def _add(self, hook_point: HookPoint, when: str) -> None:
        self._found.setdefault(when, []).append(hook_point)


def _declaration(node: ast.expr) -> ast.Call | None:
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("replaces", "relies_on"):
        return node
    return None
