"""Dependencies between the package's parts: no import cycle, and no import of an upper layer by a lower one.

FORBIDDEN lists the imports that each part must not have. A new part needs an entry there.
"""

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
FORBIDDEN = {
    "contract": {"dist", "ops", "models", "engines"} | ADAPTERS | TOOLS,
    "runtime": {"dist", "ops", "models", "engines"} | ADAPTERS | TOOLS,
    "dist": {"ops", "models", "engines"} | ADAPTERS | TOOLS,
    "ops": {"models", "engines"} | ADAPTERS | TOOLS,
    "models": {"ops", "engines"} | ADAPTERS | TOOLS,
    "engines": {"ops", "models"} | ADAPTERS | TOOLS,
    "megatron": {"vllm"} | TOOLS,
    "vllm": {"megatron"} | TOOLS,
}
"""Forbidden imports of each part of the package, imports inside functions included."""


def when_imported(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run at import, branches included, TYPE_CHECKING blocks excluded."""
    for node in body:
        yield node
        if (
            isinstance(node, (ast.If, ast.Try, ast.With))
            and "TYPE_CHECKING" not in ast.unparse(node).partition("\n")[0]
        ):
            for part in ("body", "orelse", "finalbody"):
                yield from when_imported(getattr(node, part, []))


def imports(name: str, anywhere: bool = False) -> set[str]:
    """Return the package's files that this file imports at import time, or `anywhere` in it."""
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


def test_imports_have_no_cycle():
    tuple(graphlib.TopologicalSorter({name: imports(name) for name in FILES}).static_order())


@pytest.mark.parametrize("part", FORBIDDEN)
def test_lower_layers_do_not_import_upper_layers(part):
    for name in FILES:
        if name.split(".")[1:2] == [part]:
            known = {one.split(".")[1] for one in imports(name, anywhere=True) if "." in one}
            assert not known & FORBIDDEN[part], name


@pytest.mark.parametrize("name", [name for name in FILES if name != "alignkit.runtime.families"])
def test_families_are_named_in_one_file(name):
    """Other files use family objects: they hold no family name, and compare nothing with "cpu"."""
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Compare):
            constants = [n.value for n in (node.left, *node.comparators) if isinstance(n, ast.Constant)]
            assert "cpu" not in constants and "cuda" not in constants, (
                f"{name}, line {node.lineno}: compare family objects instead"
            )
        if isinstance(node, ast.Constant):
            assert node.value != "sm90", f"{name}, line {node.lineno}: compare family objects instead"


def test_variables_are_named_in_one_file():
    """Other files use attributes of `config.Config`."""
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and name != "alignkit.config":
                assert not re.fullmatch("ALIGNKIT_[A-Z_]+", node.value), (
                    f"{name}, line {node.lineno}: read alignkit.config instead"
                )
