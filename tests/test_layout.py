"""How the package's files may depend on each other."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
    for p in sorted((ROOT / "alignkit").rglob("*.py"))
}
ENGINES = ("megatron", "vllm", "drift", "check", "watch")


def imports(name: str, path: Path) -> set[str]:
    """The files of the package that this one imports when it is imported itself."""
    found, package = set(), name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1] if node.level else [])
            module = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                found.add(f"{module}.{alias.name}" if f"{module}.{alias.name}" in FILES else module)
    return (found & FILES.keys()) - {name}


def test_no_import_circle():
    tuple(graphlib.TopologicalSorter({name: imports(name, path) for name, path in FILES.items()}).static_order())


def test_contract_and_runtime_know_no_op():
    for name, path in FILES.items():
        if name.split(".")[1:2] in (["contract"], ["runtime"], ["dist"]):
            assert not [one for one in imports(name, path) if one.split(".")[1] in ("ops", *ENGINES)], name


@pytest.mark.parametrize("name", [n for n in FILES if n.split(".")[1:2] not in ([], *([e] for e in ENGINES))])
def test_families_are_named_in_one_file(name):
    """Elsewhere a family is an object: no name of one, and no comparison with "cpu"."""
    if name == "alignkit.runtime.families":
        return
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Compare):
            said = [n.value for n in (node.left, *node.comparators) if isinstance(n, ast.Constant)]
            assert "cpu" not in said and "cuda" not in said, f"line {node.lineno}"
        if isinstance(node, ast.Constant):
            assert node.value != "sm90", f"line {node.lineno}"
