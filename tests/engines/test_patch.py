"""The patch base class of both adapters (alignkit/engines/patch.py), with a fake engine.

tests/vllm/test_patch.py and tests/megatron/test_patch.py test the real patches.
"""

import types

import pytest

from alignkit.engines.patch import Patch
from alignkit.errors import InputError, UnsupportedError


class Base:
    def inherited(self):
        return "stock"


class Layer(Base):
    def forward(self):
        return "stock"


module = types.ModuleType("engine.module")
module.function = "stock"


class EnginePatch(Patch):
    engine, command = "the engine", "patch_engine"
    fails = False

    def install(self):
        self.version = "1.2"
        self.replace(Layer, "forward", lambda layer: self.options["size"])
        self.replace(Layer, "inherited", lambda layer: "ours")
        self.replace(module, "function", "ours")
        if self.fails:
            raise RuntimeError("half-way")


def stock():
    return Layer().forward(), Layer().inherited(), module.function, "inherited" in vars(Layer)


STOCK = ("stock", "stock", "stock", False)


def test_apply_replaces_and_undo_restores():
    with EnginePatch.apply(size=7) as handle:
        assert stock() == (7, "ours", "ours", True)
        assert EnginePatch.apply(size=7) is handle is EnginePatch.live()
        path = f"{__name__}.Layer"
        assert EnginePatch.status() == {
            "patched": True,
            "version": "1.2",
            "size": 7,
            "names": [f"{path}.forward", f"{path}.inherited", "engine.module.function"],
        }
    assert stock() == STOCK and EnginePatch.status() == {"patched": False} and handle.names == []
    handle.undo()


def test_a_second_apply_with_other_options_is_rejected():
    with (
        EnginePatch.apply(size=7),
        pytest.raises(InputError, match="size: must be 7, as in the active patch of the engine, got 8"),
    ):
        EnginePatch.apply(size=8)
    assert stock() == STOCK


def test_a_patch_that_fails_restores_everything(monkeypatch):
    monkeypatch.setattr(EnginePatch, "fails", True)
    with pytest.raises(RuntimeError, match="half-way"):
        EnginePatch.apply(size=7)
    assert stock() == STOCK and EnginePatch.live() is None


def test_undo_rejects_a_later_replacement(monkeypatch):
    handle = EnginePatch.apply(size=7)
    monkeypatch.setattr(module, "function", "theirs")
    with pytest.raises(UnsupportedError, match="engine.module.function: was replaced after patch_engine"):
        handle.undo()
    assert stock() == (7, "ours", "theirs", True) and EnginePatch.live() is handle
    handle.check_in_force(but=("function",))
    monkeypatch.undo()
    handle.undo()
    assert stock() == STOCK


def test_patches_of_two_engines_are_independent():
    class Other(Patch):
        engine, command = "another", "patch_other"

        def install(self):
            self.version = "3"

    with EnginePatch.apply(size=7), Other.apply() as other:
        assert Other.live() is other and EnginePatch.live() is not other
    assert EnginePatch.live() is None and Other.live() is None
