"""The variables of the environment: what they take, what they refuse, and the page that lists them."""

import ast
from pathlib import Path

import pytest

from alignkit import AlignkitError, BackendError, InputError
from alignkit.config import VARIABLES, Config, config, refused_variables, require_variables, unknown
from alignkit.runtime import dispatch

ROOT = Path(__file__).parents[1]
FLAGS = [v for v in VARIABLES if isinstance(v.default, bool)]
WORDS = [Config.backend, Config.cpu_isa]


def row(v) -> str:
    """The variable's line of docs/configuration.md."""
    default = ("off", "on")[v.default] if v in FLAGS else "" if v.default is None else v.default
    takes = "a flag" if v in FLAGS else ", ".join(v.allowed).strip("<>")
    return f"| `{v.name}` | {takes} | {default} | {v.meaning} | {v.when} | {'yes' if v.workers else 'no'} |"


def test_the_page_lists_them():
    page = (ROOT / "docs/configuration.md").read_text().splitlines()
    assert [line for line in page if line.startswith("| `")] == [row(v) for v in VARIABLES]


@pytest.mark.parametrize("v", VARIABLES, ids=lambda v: v.name)
def test_unset(v, monkeypatch):
    monkeypatch.delenv(v.name, raising=False)
    assert v.read() == v.default


@pytest.mark.parametrize("v", FLAGS, ids=lambda v: v.name)
def test_flags(v, monkeypatch):
    for word, value in {"1": True, " Yes\n": True, "ON": True, "0": False, "false": False, "No": False}.items():
        monkeypatch.setenv(v.name, word)
        assert v.read() is value
    monkeypatch.setenv(v.name, "")
    assert v.read() is v.default
    monkeypatch.setenv(v.name, "maybe")
    with pytest.raises(
        InputError, match=f"^{v.name}: 'maybe' is neither of 1, on, true, yes nor of 0, false, no, off$"
    ):
        v.read()


def test_all_of_them_are_looked_at(monkeypatch):
    for v in VARIABLES:
        monkeypatch.delenv(v.name, raising=False)
    require_variables()
    monkeypatch.setenv("ALIGNKIT_STRICT", "maybe")
    monkeypatch.setenv("ALIGNKIT_BACKEND", "foo")
    assert [said.partition(":")[0] for said in refused_variables()] == ["ALIGNKIT_BACKEND", "ALIGNKIT_STRICT"]
    with pytest.raises(InputError, match="ALIGNKIT_BACKEND: 'foo' is none of .*; ALIGNKIT_STRICT: 'maybe' is neither"):
        require_variables()


@pytest.mark.parametrize("v", WORDS, ids=lambda v: v.name)
def test_words(v, monkeypatch):
    for word in v.allowed:
        monkeypatch.setenv(v.name, f"{word} ")
        assert v.read() == word
    monkeypatch.setenv(v.name, "none")
    with pytest.raises(AlignkitError, match=f"^{v.name}: 'none' is none of {', '.join(v.allowed)}$"):
        v.read()


def test_what_is_read_is_what_it_says_now(monkeypatch):
    monkeypatch.setenv("ALIGNKIT_COMMIT", "abc")
    assert config.commit == "abc"
    monkeypatch.setenv("ALIGNKIT_COMMIT", "")
    assert config.commit == ""
    monkeypatch.setenv("ALIGNKIT_SYMMETRIC_TIMEOUT", "2.5")
    assert config.symmetric_timeout == 2.5


def test_the_backend_is_kept_until_it_is_read_again(monkeypatch):
    monkeypatch.setattr(dispatch, "_choice", None)
    monkeypatch.setenv("ALIGNKIT_BACKEND", "reference")
    assert dispatch.name("cpu") == "reference"
    monkeypatch.setenv("ALIGNKIT_BACKEND", "fast")
    assert dispatch.name("cpu") == "reference"
    dispatch.read_again()
    with pytest.raises(BackendError, match="ALIGNKIT_BACKEND: 'fast' is none of auto, cpu, reference, triton, cuda"):
        dispatch.name("cpu")


def test_names_that_are_none():
    assert unknown({"ALIGNKIT_STRCIT": "1", "ALIGNKIT_STRICT": "1", "PATH": ""}) == ["ALIGNKIT_STRCIT"]


def test_nothing_else_reads_them():
    """No file of the package asks the environment for a variable of the table, but to put it back as it was."""
    names, found = {v.name for v in VARIABLES}, []
    for path in sorted((ROOT / "alignkit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
                asked = node.args[0]
                if isinstance(asked, ast.Constant) and asked.value in names:
                    found.append(f"{path.name}: {asked.value}")
    assert not found
