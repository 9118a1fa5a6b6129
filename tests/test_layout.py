"""How the package's files may depend on each other."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
    for p in sorted((ROOT / "alignkit").rglob("*.py"))
}
TOOLS = {"check", "drift", "watch", "integrations", "doctor", "explain", "cli", "testing"}
ADAPTERS = {"megatron", "vllm"}
NOT_FOR = {
    "contract": {"dist", "ops", "models", "engines"} | ADAPTERS | TOOLS,
    "runtime": {"dist", "ops", "models", "engines"} | ADAPTERS | TOOLS,
    "dist": {"ops", "models", "engines"} | ADAPTERS | TOOLS,
    "ops": {"models", "engines"} | ADAPTERS | TOOLS,
    "models": {"ops", "engines"} | ADAPTERS | TOOLS,
    "engines": {"ops", "models"} | ADAPTERS | TOOLS,
    "megatron": {"vllm"} | TOOLS,
    "vllm": {"megatron"} | TOOLS,
}
"""Of parts of the package, what their files never import, not in a function either."""


def when_imported(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a file is imported, in branches too, but for what type checkers alone see."""
    for node in body:
        yield node
        if (
            isinstance(node, (ast.If, ast.Try, ast.With))
            and "TYPE_CHECKING" not in ast.unparse(node).partition("\n")[0]
        ):
            for part in ("body", "orelse", "finalbody"):
                yield from when_imported(getattr(node, part, []))


def imports(name: str, anywhere: bool = False) -> set[str]:
    """The files of the package that this one imports when it is imported itself; or `anywhere` in it."""
    path, found = FILES[name], set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if anywhere else when_imported(tree.body):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1] if node.level else [])
            module = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                found.add(f"{module}.{alias.name}" if f"{module}.{alias.name}" in FILES else module)
    return (found & FILES.keys()) - {name}


def test_no_import_circle():
    tuple(graphlib.TopologicalSorter({name: imports(name) for name in FILES}).static_order())


@pytest.mark.parametrize("part", NOT_FOR)
def test_what_is_below_knows_nothing_of_what_is_above(part):
    for name in FILES:
        if name.split(".")[1:2] == [part]:
            known = {one.split(".")[1] for one in imports(name, anywhere=True) if "." in one}
            assert not known & NOT_FOR[part], name


@pytest.mark.parametrize("name", [name for name in FILES if name != "alignkit.runtime.families"])
def test_families_are_named_in_one_file(name):
    """Elsewhere a family is an object: no name of one, and no comparison with "cpu"."""
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Compare):
            said = [n.value for n in (node.left, *node.comparators) if isinstance(n, ast.Constant)]
            assert "cpu" not in said and "cuda" not in said, f"line {node.lineno}"
        if isinstance(node, ast.Constant):
            assert node.value != "sm90", f"line {node.lineno}"


def test_variables_are_named_in_one_file():
    """Elsewhere one of alignkit's is an attribute of `config.Config`."""
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and name != "alignkit.config":
                assert not re.fullmatch("ALIGNKIT_[A-Z_]+", node.value), f"{name}, line {node.lineno}"
