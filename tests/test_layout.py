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
BASE = {"_sources", "config", "contract", "errors"}
ADAPTERS = {"megatron", "vllm"}
ENGINES = ADAPTERS | {"convert", "dist", "engines", "identity", "models", "ops", "runtime"}
ALLOWED = {
    "_sources": set(),
    "errors": set(),
    "contract": set(),
    "config": {"errors"},
    "runtime": BASE,
    "dist": BASE | {"runtime"},
    "ops": BASE | {"dist", "runtime"},
    "models": BASE,
    "convert": BASE | {"models"},
    "identity": BASE | {"models", "ops"},
    "engines": BASE | {"runtime"},
    "megatron": BASE | ENGINES - ADAPTERS,
    "vllm": BASE | ENGINES - ADAPTERS,
    "drift": BASE | {"identity", "runtime"},
    "jobs": BASE | ENGINES | {"drift"},
    "check": BASE | {"convert", "drift", "jobs", "models", "runtime"},
    "bisect": BASE | ENGINES | {"drift", "jobs"},
    "watch": BASE | {"drift", "runtime"},
    "integrations": BASE | ENGINES | {""},
    "explain": BASE | {"ops", "runtime"},
    "doctor": BASE | {"dist", "ops", "runtime"},
    "prove": BASE | ENGINES | {"check", "doctor", "jobs"},
    "testing": {"dist", "jobs"},
}
"""Part of the package (a folder or a file) -> the parts that it may import, inside functions included.

"" is the package's `__init__`, which imports the adapters when they are first used.
"""
FREE = {"", "cli"}
"""Parts that may import every part: the package's `__init__` and the command line."""


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


def part_of(name: str) -> str:
    """Return the part of the package that a file belongs to; "" for the package's `__init__`."""
    return name.split(".")[1] if "." in name else ""


@pytest.mark.parametrize("part", sorted({part_of(name) for name in FILES} - FREE))
def test_a_part_imports_only_the_parts_below_it(part):
    for name in FILES:
        if part_of(name) == part:
            found = {part_of(one) for one in imports(name, anywhere=True)} - {part}
            assert found <= ALLOWED[part], f"{name}: {sorted(found - ALLOWED[part])}"


def test_the_order_of_the_parts_has_no_cycle():
    tuple(graphlib.TopologicalSorter(ALLOWED).static_order())
    assert "cli" not in set().union(*ALLOWED.values())


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
