"""A digest of code that comments, docstrings and formatting do not change.

The digest of a run is stored in its result file, so that rows stay current when a commit rewrites the text around the
code they measured. A change of the tokens that this module yields makes all stored rows look outdated.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

FORMATTING = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
C_TOKEN = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
    r"|(?P<comment>//[^\n]*|/\*.*?\*/)"
    r"|(?P<word>\w+)|(?P<continued>\\\n)|(?P<other>\S)",
    re.DOTALL,
)


def digest(paths: Iterable[Path], root: Path) -> str:
    """Return the SHA-256 of the code in files, with their paths relative to `root`, as hexadecimal digits."""
    total = hashlib.sha256()
    for path in paths:
        code = "\n".join(tokens(path)).encode()
        total.update(f"{path.relative_to(root)} {len(code)} ".encode() + code)
    return total.hexdigest()


def tokens(path: Path) -> Iterator[str]:
    """Yield the tokens of a Python, C++, CUDA or JSON file without comments, docstrings and formatting."""
    source = path.read_text()
    if path.suffix == ".py":
        yield from _python(source)
    elif path.suffix == ".json":
        yield json.dumps(json.loads(source), sort_keys=True)
    else:
        yield from _c(source)


def _c(source: str) -> Iterator[str]:
    for match in C_TOKEN.finditer(source):
        if match.lastgroup not in ("comment", "continued"):
            yield match[0]


def _python(source: str) -> Iterator[str]:
    """Yield Python's tokens; an f-string is one token, as it is before Python 3.12."""
    docstrings = set(_docstrings(ast.parse(source)))
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(position: tuple[int, int]) -> int:
        return starts[position[0] - 1] + position[1]

    comma = False
    nested, begin = 0, 0
    in_docstring = False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        if name == "FSTRING_START":
            begin = begin if nested else place(token.start)
            nested += 1
        if name == "FSTRING_END":
            nested -= 1
        if nested or token.type in FORMATTING:
            continue
        text = source[begin : place(token.end)] if name == "FSTRING_END" else token.string
        if token.type == tokenize.STRING and token.start in docstrings:
            in_docstring = True
            continue
        if token.type == tokenize.NEWLINE:
            text, in_docstring = ("" if in_docstring else ";"), False
        if token.type in (tokenize.INDENT, tokenize.DEDENT):
            text = name
        if comma and text not in (")", "]", "}"):  # a comma before a bracket is formatting
            yield ","
        comma = text == ","
        if text and not comma:
            yield text


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """Yield the line and column of every string that is a statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.lineno, node.value.col_offset
