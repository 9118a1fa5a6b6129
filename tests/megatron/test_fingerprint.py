"""What ranks compare of their models: each thing that changes numbers or collectives changes it, in place or not."""

import pytest
import torch

from alignkit.errors import InputError
from alignkit.megatron import patch_megatron
from tests.megatron import workers


@pytest.fixture
def patched(world):
    with patch_megatron(300) as handle:
        yield handle


def norm_of(model):
    return model.decoder.layers[1].input_layernorm


CHANGES = {
    "eps of norms": lambda model: setattr(norm_of(model), "eps", 1e-3),
    "types of parameters": lambda model: norm_of(model).float(),
    "shapes of parameters": lambda model: setattr(norm_of(model).weight, "data", torch.ones(128, dtype=torch.bfloat16)),
    "sequence_parallel marks of parameters": lambda model: setattr(norm_of(model).weight, "sequence_parallel", True),
    "sequence_parallel of modules": lambda model: setattr(
        model.decoder.layers[0].mlp.linear_fc1, "sequence_parallel", True
    ),
    "gather_output of modules": lambda model: setattr(model.output_layer, "gather_output", True),
    "classes of modules": lambda model: setattr(model.decoder.layers[0], "more", torch.nn.Dropout(0.0)),
    "recompute_granularity": lambda model: setattr(model.config, "recompute_granularity", "full"),
    "ffn_hidden_size": lambda model: setattr(model.config, "ffn_hidden_size", 128),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen(what, checkpoint, patched):
    model = workers.build(checkpoint(), torch.bfloat16)
    before = patched.models.adopt(model, runs=True)
    assert patched.models.adopt(model, runs=True) == before
    assert patched.models.adopt(workers.build(checkpoint(), torch.bfloat16), runs=True) == before, "another of the same"
    CHANGES[what](model)
    after = patched.models.adopt(model, runs=True)
    assert what in {name for name in before if before[name] != after[name]}, after


def test_it_says_how_many_of_what(checkpoint, patched):
    model = workers.build(checkpoint(), torch.bfloat16)
    norms = sum(isinstance(m, torch.nn.RMSNorm) for m in model.modules())
    assert patched.models.adopt(model)["eps of norms"].startswith(f"{norms} x 1e-06 (")
    norm_of(model).eps = 1e-3
    assert patched.models.adopt(model)["eps of norms"].startswith(f"1 x 0.001, {norms - 1} x 1e-06 (")


def test_ranks_are_told_what_differs(checkpoint, pair):
    for kind, message in pair.run(2, workers.wrong_on_one_rank, checkpoint(), "eps of norms"):
        assert kind == InputError.__name__ and message.startswith("eps of norms: differs") and "1 x 0.001" in message
