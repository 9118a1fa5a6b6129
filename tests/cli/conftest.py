"""Fixtures of the command line's tests: run `alignkit` in this process, and hide installed packages.

tests/watch and tests/integrations import them too.
"""

import sys

import pytest

from alignkit import cli


@pytest.fixture
def alignkit(capsys):
    """Return a function that runs the CLI in this process and returns (exit status, stdout, stderr)."""

    def run(*args):
        try:
            cli.main([str(a) for a in args])
            status = 0
        except SystemExit as e:
            status = e.code or 0
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def without_modules(monkeypatch):
    """Return a function that hides top-level packages as if they were not installed."""

    def hide(*names):
        for name in names:
            for loaded in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
                monkeypatch.delitem(sys.modules, loaded)
        finder = _Hidden(names)
        monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])

    return hide


class _Hidden:
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None
