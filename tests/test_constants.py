"""Every constant of the ops and kernels carries a mark, and a mirrored constant equals its source.

The marks are `contract:` (changes bits), `schedule:` (changes speed or memory), `hardware:` (a fact of the device) and
`mirrors FILE:NAME` (equals a constant of another file). A mark stands in the comment or docstring. Files are parsed.
Constants of kernels.h are read by both languages.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from alignkit.runtime.shared import KERNELS

ROOT = Path(__file__).parents[1]
SUFFIXES = (".py", ".cu", ".cuh", ".h", ".inl", ".cpp")
FOLDERS = ("alignkit/ops", "alignkit/contract", "alignkit/dist", "alignkit/runtime", "csrc")
MARK = re.compile(r"\b(contract|schedule|hardware):|\bmirrors (?P<file>[\w./]+):(?P<name>[A-Za-z_]\w*(?:\.\w+)?)")
C_CONSTANT = re.compile(
    r"^(?:static |inline )*constexpr (?:unsigned |long )*(?:\w+(?:::\w+)?) "
    r"(?P<first>k?[A-Z]\w*) = (?P<rest>[^;{]*);(?P<comment>.*)$"
)
ASSIGNMENT = re.compile(r"_?[A-Z][A-Z0-9_, ]* = ")
"""A line between a constant and the comment above a block of constants, which marks them all."""


class Constant(NamedTuple):
    """A constant with a literal value: its file relative to the root, line, name, value and the text beside it."""

    file: str
    line: int
    name: str
    value: object
    text: str | None
    """The comment or docstring beside it; None if the constant is computed from others and needs no mark."""


def _value(node: ast.expr) -> object:
    """Return the value of a literal or of `tl.constexpr(literal)`; None for any other expression."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("constexpr") and len(node.args) == 1:
        node = node.args[0]
    if any(
        not isinstance(
            n, (ast.Constant, ast.operator, ast.unaryop, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.Dict, ast.Load)
        )
        for n in ast.walk(node)
    ):
        return None
    if not any(
        isinstance(n, ast.Constant) and isinstance(n.value, (int, float)) and not isinstance(n.value, bool)
        for n in ast.walk(node)
    ):
        return None
    return eval(compile(ast.Expression(node), "constant", "eval"), {})


def python_constants(path: Path) -> Iterator[Constant]:
    """Yield the numeric constants at a module's top level."""
    source = path.read_text()
    lines, body = source.splitlines(), ast.parse(source).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names = [t.id for t in targets if isinstance(t, ast.Name) and re.fullmatch(r"_?[A-Z][A-Z0-9_]*", t.id)]
        if not names or node.value is None or (value := _value(node.value)) is None:
            continue
        text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        above = node.lineno - 2
        while above >= 0 and (lines[above].startswith("#") or ASSIGNMENT.match(lines[above])):
            text = lines[above] + "\n" + text if lines[above].startswith("#") else text
            above -= 1
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text += f"\n{following.value.value}"
        for name in names:
            yield Constant(str(path.relative_to(ROOT)), node.lineno, name, value, text)


def c_constants(path: Path) -> Iterator[Constant]:
    """Yield the numeric `constexpr` constants at namespace scope; those computed from others have no text."""
    lines = path.read_text().splitlines()
    known: dict[str, object] = {}
    for number, line in enumerate(lines):
        if not (match := C_CONSTANT.match(line)):
            continue
        text, above = match["comment"], number - 1
        while above >= 0 and lines[above].startswith("//"):
            text = lines[above] + "\n" + text
            above -= 1
        for part in re.split(r", (?=k?[A-Z]\w* = )", f"{match['first']} = {match['rest']}"):
            name, _, expression = part.partition(" = ")
            expression = re.sub(r"(?<=[\da-fA-F])[uUlLf]+\b|'", "", expression)
            words = set(re.findall(r"\b[A-Za-z_]\w*", expression))
            if words <= known.keys() and re.fullmatch(r"[\w\s.()*/+<>-]+", expression):
                known[name] = eval(expression.replace("/", "//") if "." not in expression else expression, {}, known)
                yield Constant(str(path.relative_to(ROOT)), number + 1, name, known[name], None if words else text)


def constants(path: Path) -> list[Constant]:
    return list(python_constants(path) if path.suffix == ".py" else c_constants(path))


FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
ALL = [constant for path in FILES for constant in constants(path)]
MIRRORED = [c for c in ALL if c.text is not None and (match := MARK.search(c.text)) and match["file"]]


def test_the_search_finds_constants_of_both_languages():
    assert {c.name for c in ALL} >= {"K_LEAVES", "VOCAB_TILE", "kStages", "kIdsPerCta"}


@pytest.mark.parametrize("path", sorted({c.file for c in ALL}))
def test_every_constant_is_marked(path):
    unmarked = [
        f"{c.file}:{c.line}: {c.name} = {c.value}"
        for c in ALL
        if c.file == path and c.text is not None and not MARK.search(c.text)
    ]
    assert not unmarked, "no contract:, schedule:, hardware: or mirrors mark:\n" + "\n".join(unmarked)


@pytest.mark.parametrize("constant", MIRRORED, ids=lambda c: f"{c.file}:{c.name}")
def test_a_mirrored_constant_equals_its_source(constant):
    match = MARK.search(constant.text)
    assert constant.value == source_value(match["file"], match["name"])


def source_value(file: str, name: str) -> object:
    """Return the value of a constant in a file, or of a module's object's attribute, such as `CPU.kv_leaf`."""
    holder, _, attribute = name.rpartition(".")
    if holder:
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        return getattr(getattr(module, holder), attribute)
    (found,) = [c.value for c in constants(ROOT / file) if c.name == name]
    return found


def test_shared_constants_are_those_of_the_header():
    """The compiler reads kernels.h as shared.py does."""
    header = ROOT / "alignkit/runtime/kernels.h"
    assert len(KERNELS) == len(re.findall("=", re.sub("//.*", "", header.read_text())))
    checks = "".join(f"static_assert(int({name}) == {value});" for name, value in KERNELS.items())
    code = f'#include "{header}"\nnamespace alignkit {{ using enum Form; {checks} }}'
    subprocess.run(["c++", "-std=c++20", "-fsyntax-only", "-x", "c++", "-"], input=code, text=True, check=True)


@pytest.mark.parametrize("name", KERNELS)
def test_a_shared_constant_is_read_by_both_languages(name):
    texts = {path: path.read_text() for path in FILES if path.name != "kernels.h"}
    assert name == "F16" or any(  # the last case of csrc/cpu
        re.search(rf"\b{name}\b", text) for path, text in texts.items() if path.suffix != ".py"
    )
    assert any(f'"{name}"' in text for path, text in texts.items() if path.suffix == ".py")


def test_every_mark_of_a_mirror_is_compared():
    found = {
        (match["file"], match["name"])
        for path in (path for folder in ("alignkit", "csrc") for path in (ROOT / folder).rglob("*"))
        if path.suffix in SUFFIXES
        for match in MARK.finditer(path.read_text())
        if match["file"]
    }
    compared = {(match["file"], match["name"]) for c in MIRRORED for match in [MARK.search(c.text)]}
    assert found == compared
