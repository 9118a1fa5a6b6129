"""Environment variables of alignkit/config.py: accepted values, rejected values and their messages.

A new variable needs its row in docs/configuration.md, which this file compares with the code.
"""

import ast
from pathlib import Path

import pytest

from alignkit import AlignkitError, BackendError, InputError
from alignkit.config import VARIABLES, Config, config, invalid_variables, require_variables, unknown
from alignkit.runtime import dispatch

ROOT = Path(__file__).parents[1]
FLAGS = [v for v in VARIABLES if isinstance(v.default, bool)]
WORDS = [Config.backend, Config.cpu_isa]


def row(v) -> str:
    """Return the variable's line of docs/configuration.md."""
    default = ("off", "on")[v.default] if v in FLAGS else "" if v.default is None else v.default
    takes = "a flag" if v in FLAGS else ", ".join(v.allowed).strip("<>")
    return f"| `{v.name}` | {takes} | {default} | {v.meaning} | {v.when} | {'yes' if v.workers else 'no'} |"


def test_page_lists_every_variable():
    page = (ROOT / "docs/configuration.md").read_text().splitlines()
    assert [line for line in page if line.startswith("| `")] == [row(v) for v in VARIABLES]


@pytest.mark.parametrize("v", VARIABLES, ids=lambda v: v.name)
def test_unset_variable_gives_its_default(v, monkeypatch):
    monkeypatch.delenv(v.name, raising=False)
    assert v.read() == v.default


@pytest.mark.parametrize("v", FLAGS, ids=lambda v: v.name)
def test_flag_accepts_only_booleans(v, monkeypatch):
    for word, value in {"1": True, " Yes\n": True, "ON": True, "0": False, "false": False, "No": False}.items():
        monkeypatch.setenv(v.name, word)
        assert v.read() is value
    monkeypatch.setenv(v.name, "")
    assert v.read() is v.default
    monkeypatch.setenv(v.name, "maybe")
    with pytest.raises(
        InputError, match=rf"^{v.name}: must be a boolean \(1/on/true/yes or 0/false/no/off\), got 'maybe'$"
    ):
        v.read()


def test_all_variables_are_validated(monkeypatch):
    for v in VARIABLES:
        monkeypatch.delenv(v.name, raising=False)
    require_variables()
    monkeypatch.setenv("ALIGNKIT_STRICT", "maybe")
    monkeypatch.setenv("ALIGNKIT_BACKEND", "foo")
    assert [said.partition(":")[0] for said in invalid_variables()] == ["ALIGNKIT_BACKEND", "ALIGNKIT_STRICT"]
    with pytest.raises(
        InputError, match="ALIGNKIT_BACKEND: must be one of .*, got 'foo'; ALIGNKIT_STRICT: must be a boolean .*'maybe'"
    ):
        require_variables()


@pytest.mark.parametrize("v", WORDS, ids=lambda v: v.name)
def test_variable_accepts_only_its_allowed_words(v, monkeypatch):
    for word in v.allowed:
        monkeypatch.setenv(v.name, f"{word} ")
        assert v.read() == word
    monkeypatch.setenv(v.name, "none")
    with pytest.raises(AlignkitError, match=f"^{v.name}: must be one of {', '.join(v.allowed)}, got 'none'$"):
        v.read()


def test_config_follows_the_environment(monkeypatch):
    monkeypatch.setenv("ALIGNKIT_COMMIT", "abc")
    assert config.commit == "abc"
    monkeypatch.setenv("ALIGNKIT_COMMIT", "")
    assert config.commit == ""
    monkeypatch.setenv("ALIGNKIT_SYMMETRIC_TIMEOUT", "2.5")
    assert config.symmetric_timeout == 2.5


def test_backend_is_cached_until_it_is_read_again(monkeypatch):
    monkeypatch.setattr(dispatch, "_choice", None)
    monkeypatch.setenv("ALIGNKIT_BACKEND", "reference")
    assert dispatch.backend_of("cpu") == "reference"
    monkeypatch.setenv("ALIGNKIT_BACKEND", "fast")
    assert dispatch.backend_of("cpu") == "reference"
    dispatch.reset_choice()
    with pytest.raises(
        BackendError, match="ALIGNKIT_BACKEND: must be one of auto, cpu, reference, triton, cuda, got 'fast'"
    ):
        dispatch.backend_of("cpu")


def test_unknown_names_are_reported():
    assert unknown({"ALIGNKIT_STRCIT": "1", "ALIGNKIT_STRICT": "1", "PATH": ""}) == ["ALIGNKIT_STRCIT"]


def test_only_config_reads_the_variables():
    """No other file reads a listed variable from the environment by its name."""
    names, found = {v.name for v in VARIABLES}, []
    for path in sorted((ROOT / "alignkit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
                name = node.args[0]
                if isinstance(name, ast.Constant) and name.value in names:
                    found.append(f"{path.name}: {name.value}")
    assert not found
