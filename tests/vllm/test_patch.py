"""`patch_vllm` on real vLLM: a patch that fails midway changes nothing, and undo restores everything the patch set."""

import os

import pytest

from alignkit.errors import UnsupportedError


@pytest.fixture(scope="module")
def process(vllm_process):
    return vllm_process()


def places():
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine import async_llm, llm_engine
    from vllm.v1.engine.input_processor import InputProcessor

    return [
        (EngineArgs, "create_engine_config"),
        (llm_engine, "InputProcessor"),
        (async_llm, "InputProcessor"),
        (InputProcessor, "_validate_params"),
    ]


def values():
    return [getattr(owner, name) for owner, name in places()]


def patch_that_fails(state, at):
    """Fail replacement number `at`; return the error, whether all values are restored, the status and the variable."""
    from alignkit.engines import patch
    from alignkit.vllm import patch_vllm, status

    before, calls = values(), []

    def failing(*args):
        calls.append(args)
        if len(calls) == at:
            raise TypeError("cannot be set")
        setattr(*args)

    patch.setattr = failing
    try:
        patch_vllm()
        error = None
    except TypeError as e:
        error = str(e)
    finally:
        del patch.setattr
    return error, values() == before, status()["patched"], os.environ["ALIGNKIT_VLLM"]


def replaced_since(state):
    """Replace a name after the patch; return the error of undo, then the state after removing the replacement."""
    from alignkit.vllm import patch_vllm, status

    before, patch, (owner, name) = values(), patch_vllm(), places()[0]
    ours = getattr(owner, name)

    def theirs(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    setattr(owner, name, theirs)
    try:
        patch.undo()
        error = None
    except UnsupportedError as e:
        error = str(e)
    kept, live = getattr(owner, name) is theirs, status()["patched"]
    setattr(owner, name, ours)
    patch.undo()
    return error, kept, live, values() == before, status()["patched"]


def variable_changed_since(state):
    from alignkit.vllm import patch_vllm

    os.environ["ALIGNKIT_VLLM"] = "no"
    with patch_vllm():
        inside = os.environ["ALIGNKIT_VLLM"]
    restored = os.environ["ALIGNKIT_VLLM"]
    with patch_vllm():
        os.environ["ALIGNKIT_VLLM"] = "off"
    return inside, restored, os.environ["ALIGNKIT_VLLM"]


@pytest.mark.parametrize("at", [1, 3, 4])
def test_a_patch_that_fails_midway_restores_everything(process, at):
    assert process(patch_that_fails, at) == ("cannot be set", True, False, "")


def test_undo_rejects_a_later_replacement(process):
    error, kept, live, restored, still_live = process(replaced_since)
    assert "EngineArgs.create_engine_config: was replaced after patch_vllm, by replaced_since" in error
    assert kept and live
    assert restored and not still_live


def test_undo_restores_the_variable_unless_it_was_set_since(process):
    assert process(variable_changed_since) == ("1", "no", "off")
