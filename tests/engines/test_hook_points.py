"""Hook points are read from the declarations and imports of an adapter, without running it, and resolved in sources."""

from pathlib import Path

import pytest

from alignkit.engines.hook_points import HookPoint, declared, unresolved
from alignkit.engines.versions import Names, Versions

ADAPTER = """
from engine import fast as quick
from engine.layers import Linear, norms
import torch

try:
    from engine import optional
except ImportError:
    optional = None
if torch:
    from engine import other

relies_on("config.py:Config", members="size depth")


class Aligned(Mixin, Linear):
    @replaces()
    def forward(self, x, bias=None, **_):
        return quick.kernel(x)

    @replaces("layers/linear.py:Base.load", "path", mentions="read", when="new")
    def load(self):
        from engine.files import read

    def helper(self, y): ...


@relies_on("run.py:Runner.step", "batch")
class Norm(norms.Norm):
    @replaces(when="new")
    def scale(self): ...
"""
EVERY = [
    HookPoint("", "fast"),
    HookPoint("layers", "Linear"),
    HookPoint("layers", "norms"),
    HookPoint("config.py", "Config.size"),
    HookPoint("config.py", "Config.depth"),
    HookPoint("layers", "Linear.forward", ("x", "bias")),
    HookPoint("fast", "kernel"),
    HookPoint("run.py", "Runner.step", ("batch",)),
    HookPoint("layers/norms", "Norm"),
]
NEW = [
    HookPoint("layers/linear.py", "Base.load", ("path",), ("read",)),
    HookPoint("files", "read"),
    HookPoint("layers/norms", "Norm.scale"),
]
ENGINE = {
    "__init__.py": "",
    "fast.py": "def kernel(x): ...",
    "layers/__init__.py": "from .linear import *",
    "layers/linear.py": "class Base:\n    def load(self, path): read()\nclass Linear(Base): ...",
    "layers/norms.py": "class Norm:\n    def scale(self): ...",
    "config.py": "class Config:\n    size: int\n    depth: int = 1",
    "run.py": "class Runner:\n    def step(self, batch): ...",
    "files.py": "from os import read",
}


@pytest.fixture
def adapter(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "layers.py").write_text(ADAPTER)
    return tmp_path / "adapter"


def test_declarations_and_imports_are_read(adapter):
    found = declared(adapter, "engine")
    assert set(found[""]) == set(EVERY) and len(found[""]) == len(EVERY)
    assert set(found.pop("new")) == set(NEW) and found.keys() == {""}


def engine(tmp_path: Path, **changes: str) -> Path:
    for name, text in (ENGINE | {name.replace("__", "/") + ".py": text for name, text in changes.items()}).items():
        path = tmp_path / "engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "engine"


PLAIN = [h for h in EVERY if h.name != "Linear.forward"] + NEW


def test_names_are_resolved_in_modules_packages_and_star_imports(tmp_path):
    assert unresolved(engine(tmp_path), PLAIN) == []


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"fast": ""}, "fast: kernel: not found"),
        ({"layers__norms": ""}, "layers/norms: Norm: not found"),
        ({"layers____init__": ""}, None),
        ({"config": "class Config:\n    size: int"}, "config.py: Config.depth: not found"),
        ({"run": "class Runner:\n    def step(self): ..."}, "run.py: Runner.step: does not take batch"),
        ({"layers__linear": "class Base:\n    def load(self, path): ..."}, "layers/linear.py: Base.load: its source"),
    ],
)
def test_missing_names_are_reported(change, problem, tmp_path):
    root = engine(tmp_path, **change)
    if problem is None:
        (root / "layers" / "__init__.py").write_text("")
        problem = "layers: Linear: not found"
    assert any(line.startswith(problem) for line in unresolved(root, PLAIN))


def versions(adapter, derive):
    return Versions("Engine", "engine", "engine", adapter, derive, {}, {})


def test_an_unknown_feature_is_an_error(adapter, tmp_path):
    """`derive` must handle every feature that a declaration names."""
    names, _ = versions(adapter, lambda names: names.require("", "new")).names(engine(tmp_path))
    assert set(names.hook_points) == {*EVERY, *NEW} and names.missing == ["layers: Linear.forward: no class Linear"], (
        "the class of a star import has no methods to resolve"
    )
    with pytest.raises(ValueError, match="when: must be a feature that `derive` handles, got new"):
        versions(adapter, lambda names: names.require("")).names(engine(tmp_path))


def test_features_are_required_optional_or_alternatives(tmp_path):
    """A feature counts as present by its first name; a part of a present one is missing."""
    root = engine(tmp_path)
    points = {
        "one": [HookPoint("files.py", "read"), HookPoint("files.py", "write")],
        "two": [HookPoint("fast.py", "kernel")],
        "three": [HookPoint("slow.py", "kernel"), HookPoint("files.py", "read")],
    }

    def found(ask):
        names = Names(root, points)
        return ask(names), [point.file for point in names.hook_points], names.missing

    lost = "files.py: write: not found"
    assert found(lambda names: names.has("one")) == (True, ["files.py", "files.py"], [lost])
    assert found(lambda names: names.has("three")) == (False, [], [])
    assert found(lambda names: names.optional("one", "three")) == (None, ["files.py", "files.py"], [])
    assert found(lambda names: names.either("three", "two")) == ("two", ["fast.py"], [])
    assert found(lambda names: names.either("one", "three")) == ("one", ["files.py", "files.py"], [lost])
    assert found(lambda names: names.leave_out("one")) == (None, [], [])
