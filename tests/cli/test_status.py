"""Exit statuses of all commands: 1 means only "not equal", and every other outcome has its own status.

A new status needs a line in `alignkit --help` and in docs/drift.md, which a test compares.
"""

import io
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

from alignkit import cli, drift
from alignkit.bisect import points
from alignkit.drift import Logprobs, save
from alignkit.errors import BackendError, InputError, UnsupportedError
from alignkit.jobs.job import DTYPES


@pytest.fixture
def files(tmp_path):
    def write(name, values):
        save(tmp_path / name, Logprobs([[1]], [[5, 6]], [torch.tensor(values)], "stock"))
        return tmp_path / name

    return write("a", [-1.0, -2.0]), write("b", [-1.0, -2.5])


def make_load_raise(monkeypatch, error):
    def load(path):
        raise error

    monkeypatch.setattr(drift, "load", load)


def test_compare_exits_with_0_or_1(alignkit, files):
    a, b = files
    assert alignkit("compare", a, a)[0] == 0 and alignkit("compare", a, b)[0] == cli.EXIT_DIFFERENT == 1


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nothing"],
        ["compare"],
        ["compare", "--colour", "a", "b"],
        ["check", "--dtype", "float16"],
        ["check", "--tp", "two"],
        ["--nothing"],
    ],
)
def test_usage_errors_exit_with_2(alignkit, args):
    status, _, err = alignkit(*args)
    assert status == cli.EXIT_USAGE == 2 and "Usage: alignkit" in err and "Traceback" not in err


@pytest.mark.parametrize(
    "error, status",
    [
        (InputError("x: bad"), cli.EXIT_REFUSED),
        (UnsupportedError("x: bad"), cli.EXIT_REFUSED),
        (BackendError("x: bad"), cli.EXIT_FAILED),
        (PermissionError(13, "Permission denied", "x"), cli.EXIT_FAILED),
    ],
)
def test_each_error_class_has_its_exit_status(alignkit, files, monkeypatch, error, status):
    make_load_raise(monkeypatch, error)
    assert alignkit("compare", *files) == (status, "", f"error: {error}\n")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("two\nlines " * 1000),
        RecursionError(),
        KeyError("x"),
        MemoryError(),
        ImportError("no such symbol"),
        AssertionError(),
    ],
)
def test_an_unexpected_error_is_shortened(alignkit, files, monkeypatch, error):
    make_load_raise(monkeypatch, error)
    status, out, err = alignkit("compare", *files)
    assert status == cli.EXIT_UNEXPECTED and not out
    assert err.startswith(f"unexpected {type(error).__name__}: ") and err.count("\n") == 2 and len(err) < 500
    assert "--traceback" in err and "Traceback" not in err
    status, _, err = alignkit("--traceback", "compare", *files)
    assert status == cli.EXIT_UNEXPECTED and err.startswith("Traceback") and "in load" in err


@pytest.mark.parametrize(
    "code, status", [(1, cli.EXIT_FAILED), ("a reason", cli.EXIT_FAILED), (0, 0), (None, 0), (2, 2)]
)
def test_a_library_exit_never_means_different(alignkit, files, monkeypatch, code, status):
    make_load_raise(monkeypatch, SystemExit(code))
    got, _, err = alignkit("compare", *files)
    assert got == status and ("a reason" in err) is (code == "a reason")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_an_interrupt_exits_with_130(alignkit, files, monkeypatch, error):
    make_load_raise(monkeypatch, error)
    assert alignkit("compare", *files)[0] == cli.EXIT_INTERRUPTED == 130


def test_exit_statuses_are_distinct_and_documented(alignkit):
    statuses = [value for name, value in vars(cli).items() if name.startswith("EXIT_")]
    assert len(set(statuses)) == len(statuses) == 6 and 0 not in statuses
    status, out, _ = alignkit("--help")
    starts = [line.split()[0] for line in out.partition("Exit status:")[2].splitlines() if line.strip()]
    listed = [start for start in starts if start.isdigit()]  # the other lines continue a status
    assert status == 0 and listed == [str(s) for s in sorted([0, *statuses])]
    text = (Path(__file__).parents[2] / "docs/drift.md").read_text()
    assert all(f"| {s} |" in text for s in (0, *statuses))


def test_names_in_the_help_equal_the_names_that_the_commands_accept():
    assert cli.DTYPES == DTYPES and cli.BISECT_OPS == points.OPS


@pytest.mark.parametrize("option", ["--model-family", "--arch"])
def test_bisect_accepts_both_names_of_the_model_family(option):
    assert cli.bisect.make_context("bisect", ["hf", "hf", option, "qwen3-moe"]).params["arch"] == "qwen3_moe"


def test_numbers_outside_a_listed_range_are_refused(alignkit, files):
    for args, message in (
        (["compare", *files, "--worst", "-1"], "worst: must be at least 0, got -1"),
        (["watch", ".", "--port", "65536"], "port: must be in [0, 65535], got 65536"),
    ):
        status, _, err = alignkit(*args)
        assert status == cli.EXIT_REFUSED and message in err


def test_the_budget_is_checked_in_mib(alignkit):
    assert alignkit("bisect", "hf", "hf", "--no-report", "--budget", "0") == (
        cli.EXIT_REFUSED,
        "",
        "error: budget: must be at least 1 MiB, got 0\n",
    )


@pytest.mark.parametrize(
    "error, message",
    [
        (BackendError("x: bad"), "error: x: bad\n"),
        (KeyError("x"), "unexpected KeyError: 'x'\nrun `alignkit --traceback COMMAND ...` to print the traceback\n"),
        (KeyboardInterrupt(), "interrupted; the engines were stopped\n"),
        (SystemExit("a reason"), "a reason\n"),
        (click.UsageError("a reason"), "Error: a reason\n"),
    ],
)
def test_errors_reach_a_stderr_that_accepts_only_text(files, monkeypatch, error, message):
    """The stream behaves like stderr under vLLM's server, which prefixes each line."""
    written = []

    def write_with_prefix(s: str):
        if s:
            written.append(s[: s.find("\n")] + s[s.find("\n") :])

    stderr = io.TextIOWrapper(io.BytesIO())
    stderr.write = write_with_prefix
    monkeypatch.setattr(sys, "stderr", stderr)
    make_load_raise(monkeypatch, error)
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", *map(str, files)])
    assert ended.value.code not in (0, 1) and "".join(written).endswith(message)


def process(*args, code="from alignkit import cli; cli.main()", **options):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_closed_output_pipe_is_a_failure(files, form):
    """A closed pipe does not make equal files look different."""
    read, write = os.pipe()
    os.close(read)
    a, _ = files
    with process("compare", a, a, *form, stdout=write) as child:
        os.close(write)
        _, err = child.communicate(timeout=120)
    assert child.returncode == cli.EXIT_FAILED and "Traceback" not in err and "Exception ignored" not in err


def test_a_broken_torch_is_an_unexpected_error(files):
    """A failing import of torch gives the status of unexpected errors."""
    code = "import sys; sys.modules['torch'] = None\nfrom alignkit import cli; cli.main()"
    with process("compare", *files, code=code, stdout=subprocess.PIPE) as child:
        _, err = child.communicate(timeout=120)
    assert child.returncode == cli.EXIT_UNEXPECTED and err.startswith("unexpected ModuleNotFoundError: ")
