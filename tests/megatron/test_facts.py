"""Facts that ranks compare before a forward: a change of a model that affects bits or collectives changes them.

CHANGES maps a name of the facts, which the error message prints, to such a change.
"""

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
def test_facts_change_with_the_model(what, checkpoint, patched):
    model = workers.build(checkpoint(), torch.bfloat16)
    before = patched.models.patch_model(model, for_forward=True)
    assert patched.models.patch_model(model, for_forward=True) == before
    assert patched.models.patch_model(workers.build(checkpoint(), torch.bfloat16), for_forward=True) == before, (
        "an equal model must have the same facts"
    )
    CHANGES[what](model)
    after = patched.models.patch_model(model, for_forward=True)
    assert what in {name for name in before if before[name] != after[name]}, after


def test_facts_count_each_value(checkpoint, patched):
    model = workers.build(checkpoint(), torch.bfloat16)
    norms = sum(isinstance(m, torch.nn.RMSNorm) for m in model.modules())
    assert patched.models.patch_model(model)["eps of norms"].startswith(f"{norms} x 1e-06 (")
    norm_of(model).eps = 1e-3
    assert patched.models.patch_model(model)["eps of norms"].startswith(f"1 x 0.001, {norms - 1} x 1e-06 (")


def test_error_on_both_ranks_says_what_differs(checkpoint, pair):
    for kind, message in pair.run(2, workers.wrong_on_one_rank, checkpoint(), "eps of norms"):
        assert (
            kind == InputError.__name__ and message.startswith("eps of norms: must be equal") and "1 x 0.001" in message
        )
