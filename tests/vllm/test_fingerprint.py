"""Fingerprints of vLLM engines: those of the HF files, in every layout and after an update of the weights."""

import pytest
import torch

from alignkit.errors import InputError, UnsupportedError
from alignkit.identity import of_checkpoint
from tests.vllm.conftest import built_model, reload, start

SLOW, MATRIX = pytest.mark.slow, pytest.mark.matrix
CASES = [
    pytest.param("qwen3", {}, {}, id="qwen3", marks=SLOW),
    pytest.param("qwen2", {"tied": True}, {}, id="qwen2-tied"),
    pytest.param("qwen3_moe", {}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, id="qwen3_moe-ep2"),
    pytest.param("qwen3", {}, {"tensor_parallel_size": 2}, id="qwen3-tp2", marks=SLOW),
    # Two ranks have the same KV head.
    pytest.param("llama", {"kv_heads": 1}, {"tensor_parallel_size": 2}, id="llama-kv1-tp2", marks=MATRIX),
    pytest.param("qwen2_moe", {}, {"tensor_parallel_size": 2}, id="qwen2_moe-tp2", marks=MATRIX),
    pytest.param("mixtral", {}, {}, id="mixtral", marks=MATRIX),
    pytest.param("glm4_moe", {}, {}, id="glm4_moe", marks=SLOW),
]


def tensors(state):
    from alignkit.vllm.fingerprint import fingerprint

    return fingerprint(state.llm).tensors


@pytest.mark.parametrize("arch, sizes, options", CASES)
def test_an_engine_has_the_fingerprint_of_its_files(arch, sizes, options, vllm_process, checkpoint):
    path = checkpoint(arch, torch.bfloat16, **sizes)
    process = vllm_process(VLLM_PLUGINS="")
    process(start, path, options)
    assert process(tensors) == of_checkpoint(path).tensors
    other = checkpoint(arch, torch.bfloat16, **sizes, seed=7)
    process(reload, other)
    assert process(tensors) == of_checkpoint(other).tensors != of_checkpoint(path).tensors


def test_a_stock_engine_is_rejected(vllm_process, checkpoint):
    process = vllm_process(VLLM_PLUGINS="")
    process(start, checkpoint(), {}, False)
    with pytest.raises(UnsupportedError, match="llm: must be an aligned engine, got a stock one"):
        process(tensors)


def public(state):
    import alignkit

    return alignkit.fingerprint(state.llm)


def test_the_public_function_takes_an_engine_a_directory_and_a_model(vllm_process, checkpoint):
    import alignkit

    path = checkpoint()
    process = vllm_process(VLLM_PLUGINS="")
    process(start, path)
    assert process(public) == alignkit.fingerprint(path)
    with pytest.raises(InputError, match="model_dir: must be the HF directory"):
        alignkit.fingerprint(torch.nn.Linear(1, 1))


def replaced(state):
    """Fingerprint the engine, then with a parameter of other values in other memory, and then of another shape."""
    model = built_model(state)
    parameter = model.model.layers[1].mlp.down_proj.weight
    found = [public(state)]
    parameter.data = parameter.data + 1
    found.append(public(state))
    parameter.data = parameter.data[:-1]
    try:
        public(state)
    except InputError as e:
        return found, str(e)


def test_replaced_parameters_are_read(vllm_process, checkpoint):
    process = vllm_process(VLLM_PLUGINS="")
    process(start, checkpoint())
    (before, after), rejection = process(replaced)
    assert "model.layers.1.mlp.down_proj.weight: the weights differ" in before.difference(after)
    assert "model.layers.1.mlp.down_proj.weight: the ranks must hold" in rejection
