"""Fingerprints of Megatron models: those of the HF files in every layout."""

from functools import partial

import pytest
import torch

from alignkit.identity import of_checkpoint
from tests.megatron import layouts

FOUR = dict(layers=4)
LAYOUTS = {
    "tp2": (2, dict(tp=2)),
    "pp2": (2, dict(pp=2)),
    "dp2": (2, {}),
    "tp4": (4, dict(tp=4)),
    "tp2-pp2": (4, dict(tp=2, pp=2)),
    "pp2-vpp2": (2, dict(pp=2, vpp=2)),
    "cp2": (2, dict(cp=2)),
}
EXPERTS = {
    "ep2": (2, dict(ep=2)),
    "tp2": (2, dict(tp=2)),
    "ep2-pp2": (4, dict(ep=2, pp=2)),
    "tp2-etp1-ep2": (4, dict(tp=2, ep=2, etp=1)),
}


def check(path, dtype, ranks, size, how, **fields):
    expected = of_checkpoint(path, dtype).tensors
    for found in ranks.run(size, layouts.fingerprint_of, path, dtype, how, fields):
        assert found == expected


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("arch, tied, dtype", [("qwen3", False, torch.bfloat16), ("qwen2", True, torch.float32)])
def test_dense_models(how, arch, tied, dtype, checkpoint, two, four):
    size, groups = LAYOUTS[how]
    ranks = four if size == 4 else two
    sizes = FOUR if "pp" in how else {}
    check(checkpoint(arch, torch.bfloat16, tied=tied, kv_heads=4, **sizes), dtype, ranks, size, groups)


@pytest.mark.parametrize("how", EXPERTS)
@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe"])
def test_moe_models(how, arch, checkpoint, two, four):
    size, groups = EXPERTS[how]
    check(checkpoint(arch, torch.bfloat16, **FOUR), torch.bfloat16, four if size == 4 else two, size, groups)


def test_a_flipped_bit_of_a_shard_is_found(checkpoint, two):
    path = checkpoint("qwen3", torch.bfloat16)
    run = partial(layouts.fingerprint_of, how=dict(tp=2), fields={})
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    (found, _) = two.run(2, partial(run, flip=(1, name)), path, torch.bfloat16)
    expected = of_checkpoint(path).tensors
    different = [hf for hf in expected if found[hf] != expected[hf]]
    assert different == ["model.layers.1.mlp.down_proj.weight"]


def test_replicas_that_differ_are_named(checkpoint, two):
    path = checkpoint("qwen3", torch.bfloat16)
    for how, name in ((dict(tp=2), "input_layernorm"), ({}, "mlp.linear_fc2")):
        run = partial(layouts.fingerprint_of, how=how, fields={}, flip=(0, f"decoder.layers.0.{name}.weight"))
        for outcome in two.outcomes(2, run, path, torch.bfloat16):
            assert "must be equal on all ranks that hold them" in outcome.message


def test_a_sync_ends_with_the_fingerprint_of_all_ranks(checkpoint, two):
    path = checkpoint("qwen3", torch.bfloat16, **FOUR)
    for how in (dict(tp=2), dict(pp=2)):
        for rest, found in two.run(2, layouts.synced, path, torch.bfloat16, how):
            assert rest == [("a", torch.ones(1))] and found == of_checkpoint(path).tensors
