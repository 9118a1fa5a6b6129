"""Check the wording of docstrings, comments and pages: `python -m tests.wording`, part of `make lint`.

Ruff checks the form of docstrings (pydocstyle) and codespell the spelling. This module holds the rules that neither
has: openers that hide the subject of a sentence, private words for terms of art, and the length of sentences in pages.
tests/test_wording.py tests it; CONTRIBUTING.md, "How we write", states the rules.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
OPENERS = "Of What Whatever Whether Who Whose Whom Which Where As By That Those There Likewise".split()
OPENER = re.compile(rf"\s*(?:{'|'.join(OPENERS)})\b", re.IGNORECASE)
CAPITAL_OPENER = re.compile(rf"\s*(?:{'|'.join(OPENERS)})\b")
PRIVATE_WORDS = {
    r"copy engines?": "TMA",
    r"multiprocessors?": "SM",
    r"trunks?": "decoder, or transformer layers",
    r"seams?": "hook point",
    r"mends?|mended": "fix",
    r"blocks? of threads": "CTA, or thread block",
    r"groups? of four warps": "warpgroup",
    r"heads of keys": "KV heads",
    r"to and fro": "boustrophedon, or snake order",
    r"taken over": "patched, or replaced",
    r"looks? at|looked at": "inspect, validate, or read",
    r"is shown with|was shown with|were shown with": "validated with",
    r"falls? short": "target and measured value",
}
"""Private words, as patterns, and the term of art to write instead."""
MEDIAN_WORDS = 16
"""The largest median length of a page's sentences, in words."""
LINE = 120
"""The largest length of a line in files that ruff does not read, in characters."""
SLASHES = {".cu", ".cuh", ".h", ".cpp", ".inl", ".js", ".css"}
HASHES = {".toml", ".yml", ".yaml", ".sh", ".txt"}
NAMES_WITH_HASHES = {"Makefile", "run", ".gitignore"}
HISTORY = {"docs/glossary.md", "tests/wording.py"}
"""Files that quote the private words in order to replace them."""


class Text(NamedTuple):
    """A docstring or a run of comment lines."""

    line: int
    kind: str
    text: str


def files() -> list[Path]:
    """Return the tracked and new files of the repository, results excluded."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [ROOT / name for name in names if not name.startswith("benchmarks/results/") and (ROOT / name).is_file()]


def docstrings(source: str) -> Iterator[Text]:
    """Yield every docstring of a Python file, those below assignments included."""
    for node in ast.walk(ast.parse(source)):
        for body in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            for statement in body if isinstance(body, list) else ():
                if (
                    isinstance(statement, ast.Expr)
                    and isinstance(statement.value, ast.Constant)
                    and isinstance(statement.value.value, str)
                ):
                    yield Text(statement.lineno, "docstring", statement.value.value)


def hash_comments(source: str) -> Iterator[Text]:
    """Yield the comments of a Python file, consecutive full-line comments as one."""
    run: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#!:").strip()
        if token.line.lstrip().startswith("#") and run and token.start[0] == last + 1:
            run.append(text)
        else:
            if run:
                yield Text(start, "comment", "\n".join(run))
            run, start = [text], token.start[0]
        last = token.start[0]
        if not token.line.lstrip().startswith("#"):
            yield Text(start, "comment", text)
            run = []
    if run:
        yield Text(start, "comment", "\n".join(run))


SLASH_COMMENT = re.compile(r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|//([^\n]*)|/\*(.*?)\*/""", re.DOTALL)


def slash_comments(source: str) -> Iterator[Text]:
    """Yield the comments of a C++, CUDA, JavaScript or CSS file, consecutive full-line comments as one."""
    run: list[str] = []
    start = last = 0
    for match in SLASH_COMMENT.finditer(source):
        if match[1] is not None:
            continue
        line = source.count("\n", 0, match.start()) + 1
        whole = not source[source.rfind("\n", 0, match.start()) + 1 : match.start()].strip()
        text = (match[2] if match[2] is not None else match[3]).strip()
        if whole and run and line == last + 1:
            run.append(text)
        else:
            if run:
                yield Text(start, "comment", "\n".join(run))
            run, start = [text], line
        last = line
        if not whole:
            yield Text(start, "comment", text)
            run = []
    if run:
        yield Text(start, "comment", "\n".join(run))


def plain_comments(source: str) -> Iterator[Text]:
    """Yield the full-line comments of a file whose comments begin with #."""
    run: list[str] = []
    start = last = 0
    for number, line in enumerate(source.splitlines(), 1):
        if not line.lstrip().startswith("#"):
            continue
        text = line.lstrip().lstrip("#!").strip()
        if run and number == last + 1:
            run.append(text)
        else:
            if run:
                yield Text(start, "comment", "\n".join(run))
            run, start = [text], number
        last = number
    if run:
        yield Text(start, "comment", "\n".join(run))


def texts(path: Path) -> Iterator[Text]:
    """Yield the docstrings and comments of a source file."""
    if path.suffix == ".py":
        source = path.read_text()
        yield from docstrings(source)
        yield from hash_comments(source)
    elif path.suffix in SLASHES:
        yield from slash_comments(path.read_text())
    elif path.suffix in HASHES or path.name in NAMES_WITH_HASHES:
        yield from plain_comments(path.read_text())


def bad_opener(text: Text) -> str | None:
    """Return the banned word that opens a text, or one of a comment's lines with a capital letter."""
    if match := OPENER.match(text.text):
        return match[0].strip()
    for line in text.text.splitlines()[1:]:
        if text.kind == "comment" and (match := CAPITAL_OPENER.match(line)):
            return match[0].strip()
    return None


def private_words(text: str) -> Iterator[tuple[str, str]]:
    """Yield each private word in a text and the term to write instead."""
    for pattern, term in PRIVATE_WORDS.items():
        for match in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE):
            yield match[0], term


def prose(page: str) -> str:
    """Return the running text of a Markdown page: no code, tables, comments, headings or link targets."""
    page = re.sub(r"```.*?```|<!--.*?-->", "\n\n", page, flags=re.DOTALL)
    page = re.sub(r"^[ ]*(\||#|!\[|>).*$", "\n", page, flags=re.MULTILINE)
    page = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page)
    page = re.sub(r"`[^`]*`", "code", page)
    return re.sub(r"^[ ]*([-*+]|\d+\.)[ ]", "\n\n", page, flags=re.MULTILINE)


def sentences(page: str) -> list[str]:
    """Return the sentences of a page."""
    found = []
    for paragraph in re.split(r"\n\s*\n", prose(page)):
        found += re.split(r"(?<=[.!?:])[)\"*_]*\s+(?=[A-Z`*(\[\"])", " ".join(paragraph.split()))
    return [one for one in found if len(one.split()) > 1]


def faults(paths: Iterable[Path]) -> Iterator[str]:
    """Yield one line for each fault of wording in these files."""
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        for text in texts(path):
            if word := bad_opener(text):
                first = text.text.strip().splitlines()[0]
                yield f"{name}:{text.line}: {text.kind} opens with {word!r}: {first[:90]}"
            if name not in HISTORY:
                for word, term in private_words(text.text):
                    yield f"{name}:{text.line}: {word!r} is not a term of the field; write {term}"
        if path.suffix == ".md" and name not in HISTORY:
            page = path.read_text()
            lengths = [len(sentence.split()) for sentence in sentences(page)]
            if len(lengths) > 5 and statistics.median(lengths) > MEDIAN_WORDS:
                yield f"{name}: the median sentence has {statistics.median(lengths):g} words, more than {MEDIAN_WORDS}"
            for word, term in private_words(prose(page)):
                yield f"{name}: {word!r} is not a term of the field; write {term}"
        if path.suffix in SLASHES:
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if len(line) > LINE:
                    yield f"{name}:{number}: {len(line)} characters, more than {LINE}"


def main(names: list[str]) -> int:
    """Print the faults of the named files or folders, or of all; return the exit status."""
    chosen = [ROOT / name for name in names]
    paths = [path for path in files() if not chosen or any(path == c or c in path.parents for c in chosen)]
    found = list(faults(paths))
    print(*found, sep="\n") if found else print(f"{len(paths)} files: no fault of wording")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
