"""Fixtures for the tests of benchmarks/."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    """Return a function that imports a script of benchmarks/ in its run-time environment."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module
    for name in [n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(str(BENCHMARKS))]:
        del sys.modules[name]
