"""MoE models under real Megatron-core on a CPU: the same bits in every layout of ranks.

Logprobs must also equal tests/moe_reference.py, and gradients agree with float64 (reference.py). moe.py holds the
functions that run on the ranks; test_moe_cuda.py imports LAYOUTS.
"""

import dataclasses
import itertools
from functools import partial

import pytest
import torch

from alignkit.convert import Checkpoint, read_architecture
from alignkit.errors import UnsupportedError
from alignkit.megatron import patch_megatron
from alignkit.testing import Failed, assert_bitwise_equal
from tests import moe_reference
from tests.megatron import layouts, moe, reference, workers
from tests.megatron.test_gradients import bound
from tests.megatron.test_recompute import RECOMPUTE_CONFIGS

SIZES = dict(intermediate=128, experts=8, top_k=2)
DENSE = dict(layers=3, dense_layers=(1,), dense_intermediate=192)
"""Sizes of a model with a dense layer between two MoE layers."""
FAMILY_SIZES = {"qwen3_moe": {}, "qwen2_moe": DENSE, "glm4_moe": {}}
LAYOUTS = {
    "two data-parallel ranks, experts distributed": (dict(ep=2), False),
    "tensor parallel, experts sharded": (dict(tp=2), False),
    "tensor parallel, experts distributed": (dict(tp=2, ep=2, etp=1), False),
    "tensor parallel, experts replicated": (dict(tp=2, etp=1), False),
    "sequence parallel, experts sharded": (dict(tp=2), True),
    "sequence parallel, experts distributed": (dict(tp=2, ep=2, etp=1), True),
    "sequence parallel, experts replicated": (dict(tp=2, etp=1), True),
}
"""Name -> arguments of `layouts.layout`, sequence parallelism. Process groups of the experts differ in each."""

TRAINED = [name for name, (how, sp) in LAYOUTS.items() if how == dict(ep=2) or (sp and how != dict(tp=2, etp=1))]
"""Layouts for which every Megatron-core version computes correct gradients."""


@pytest.fixture(scope="module")
def moe_checkpoint(checkpoint):
    def make(dtype=torch.bfloat16, arch="qwen3_moe", **sizes):
        return checkpoint(arch, dtype, **(SIZES | sizes))

    return make


@pytest.fixture(scope="module")
def alone(moe_checkpoint, rows, world):
    """Return a function from dtype to `moe.all_calls` on one rank, cached."""
    cache = {}

    def compute(dtype):
        if dtype not in cache:
            cache[dtype] = moe.all_calls(None, moe_checkpoint(dtype), dtype, rows, {})[0]
        return cache[dtype]

    return compute


def select_rows(values, rows, indices):
    parts = values.split([len(row) - 1 for row in rows])
    return torch.cat([parts[i] for i in indices])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_logprobs_are_equal_across_calls_and_layouts(dtype, moe_checkpoint, rows, alone, two):
    expected = alone(dtype)
    for call in ("one", "padded", "packed", "loss call", "logits", "logprobs at 1.0"):
        assert_bitwise_equal(expected[call], expected["one"], call)
    for called, (how, sequence_parallel) in LAYOUTS.items():
        if dtype == torch.float32 and not sequence_parallel and how != dict(ep=2):
            continue
        for result, indices in two.run(2, moe.all_calls, moe_checkpoint(dtype), dtype, rows, how, sequence_parallel):
            for call, value in result.items():
                assert_bitwise_equal(value, select_rows(expected[call], rows, indices), f"{called}: {call}")


GLM = dict(layers=3, dense_layers=(0, 1), dense_intermediate=192, options=("attention_bias",), top_k=2)
"""Sizes of a model like GLM-4.5-Air, with q, k and v biases and without query/key norms."""
OTHERS = {
    "qwen2_moe bf16": ("qwen2_moe", torch.bfloat16, DENSE),
    "qwen2_moe fp32": ("qwen2_moe", torch.float32, DENSE),
    "glm4_moe bf16": ("glm4_moe", torch.bfloat16, GLM),
    "glm4_moe fp32, groups, query/key norms": (
        "glm4_moe",
        torch.float32,
        {"groups": 4, "top_groups": 1, "options": ("use_qk_norm",), "rotary_factor": 0.25},
    ),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if "qwen2" in kind else ()) for kind in OTHERS]
)
def test_logprobs_equal_a_composition_of_ops_on_unsharded_weights(kind, moe_checkpoint, rows, world, two):
    """Covers models with dense layers in every layout; the vLLM tests compare with the same composition."""
    arch, dtype, sizes = OTHERS[kind]
    path = moe_checkpoint(dtype, arch, **sizes)
    expected, _ = moe.all_calls(None, path, dtype, rows, {})
    composed = torch.cat([moe_reference.logprobs(path, row[:1], row[1:]) for row in rows])
    for call in ("one", "padded", "packed", "loss call"):
        assert_bitwise_equal(expected[call], composed, call)
    for called, (how, sequence_parallel) in LAYOUTS.items():
        if dtype == torch.float32 and called not in TRAINED:
            continue
        for result, indices in two.run(2, moe.all_calls, path, dtype, rows, how, sequence_parallel):
            for call in ("padded", "packed"):
                assert_bitwise_equal(result[call], select_rows(composed, rows, indices), f"{called}: {call}")


def test_shared_expert_that_differs_from_the_config_is_rejected(moe_checkpoint, world):
    tokens = torch.tensor([[1, 2, 3, 4]])
    with patch_megatron(300), torch.no_grad():
        model = moe.build(moe_checkpoint(arch="qwen2_moe"), torch.bfloat16)
        expected = model(tokens, None, None)
        layer = model.decoder.layers[1].mlp
        for owner, name, value in (
            (layer, "use_shared_expert", False),
            (layer.shared_experts, "use_shared_expert_gate", False),
        ):
            with (
                workers._attribute(owner, name, value),
                pytest.raises(UnsupportedError, match=rf"layers.1.mlp.*{name}"),
            ):
                model(tokens, None, None)
        assert_bitwise_equal(model(tokens, None, None), expected)


def test_stock_megatron_differs_between_layouts(moe_checkpoint, rows, alone, two):
    """Shows that the bit-equality tests can fail."""
    path, dtype = moe_checkpoint(), torch.bfloat16
    one_rank = moe.stock(None, path, dtype, rows, {})
    for called in ("tensor parallel, experts sharded", "sequence parallel, experts distributed"):
        other = two.run(2, moe.stock, path, dtype, rows, *LAYOUTS[called])[0]
        assert (other != one_rank).any(), called
    assert (one_rank != alone(dtype)["padded"]).any()


def test_unnormalized_routing_weights_give_the_same_bits(moe_checkpoint, rows, world, two):
    path = moe_checkpoint(normalize_top_k=False)
    expected, _ = moe.all_calls(None, path, torch.bfloat16, rows, {})
    for result, indices in two.run(2, moe.all_calls, path, torch.bfloat16, rows, dict(ep=2)):
        assert_bitwise_equal(result["packed"], select_rows(expected["one"], rows, indices))


def relative_error(gradient, wanted):
    """Return the relative error in norm; for an expert without tokens, 0 if its gradient is 0, else 1."""
    return ((gradient.double() - wanted).norm() / wanted.norm()).item() if wanted.any() else float(gradient.any())


@pytest.mark.parametrize("arch", FAMILY_SIZES)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=["bf16", "fp32"]
)
def test_one_step_agrees_with_float64(dtype, arch, moe_checkpoint, rows, world, two):
    """The reference uses the model's experts: its own routing could differ where scores nearly tie."""
    path = moe_checkpoint(dtype, arch, **FAMILY_SIZES[arch])
    arch = read_architecture(path)
    width = max(arch.top_k * arch.intermediate + arch.shared_intermediate, arch.dense_intermediate)
    limit = bound(dataclasses.replace(arch, intermediate=width), dtype)
    grads, chosen = moe.step(None, path, dtype, rows, {})
    again, _ = moe.step(None, path, dtype, rows, {})
    weights = reference.weights64(Checkpoint(path))
    assert [name for name in weights if name not in grads] == [name for name in weights if name.endswith("_bias")]
    for name in weights.keys() - grads.keys():  # expert biases have no gradient
        weights[name].requires_grad_(False)
    trained = {name: w for name, w in weights.items() if name in grads}
    starts = torch.tensor([0, *(len(row) - 1 for row in rows)]).cumsum(0).tolist()
    parts = [chosen[:, a:b] for a, b in itertools.pairwise(starts)]
    logp = [reference.logprobs(arch, weights, row, mine) for row, mine in zip(rows, parts, strict=True)]
    (-torch.cat(logp).mean()).backward()
    for name, w in trained.items():
        assert_bitwise_equal(again[name], grads[name], name)
        error = relative_error(grads[name], w.grad)
        assert error < limit, f"{name} is off by {error:.2e}, more than {limit:.2e}"
    for called, (how, sequence_parallel) in LAYOUTS.items():
        if called not in TRAINED:
            continue
        for other, _ in two.run(2, moe.step, path, dtype, rows, how, sequence_parallel):
            for name, w in trained.items():
                error = relative_error(other[name], w.grad)
                assert error < limit, f"{called}: {name} is off by {error:.2e}, more than {limit:.2e}"


def test_expert_gradients_are_equal_across_layouts(moe_checkpoint, rows, world, two):
    """The layouts distribute one global batch."""
    path, dtype = moe_checkpoint(), torch.bfloat16
    expected = moe.step(None, path, dtype, [*rows[::2], *rows[1::2]], {}, bare=True)[0]
    of_experts = [name for name in expected if ".experts." in name]
    for grads, _ in two.run(2, moe.step, path, dtype, rows, dict(ep=2), False, True, True):
        for name in of_experts:
            assert_bitwise_equal(grads[name], expected[name], name)
    # Input gradients of dense layers and sharded experts are summed over TP ranks, so only the last layer is bit-equal.
    distributed, sharded = (
        two.run(2, moe.step, path, dtype, rows, *LAYOUTS[f"sequence parallel, experts {how}"], True, True)[0][0]
        for how in ("distributed", "sharded")
    )
    for name in of_experts:
        if ".layers.1." in name:
            assert expected[name].any()
            assert_bitwise_equal(distributed[name], sharded[name], name)


SHARED = {
    "a shared expert": {},
    "with a gate": {"moe_shared_expert_gate": True},
    "none, sigmoid scores in groups": {
        "moe_shared_expert_intermediate_size": None,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
    },
}


@pytest.mark.parametrize("kind", SHARED)
def test_shared_experts_and_expert_groups_give_the_same_bits(kind, rows, world, two):
    """Models have a dense layer, then an MoE layer with a shared expert or expert groups."""
    fields = SHARED[kind]
    expected, _ = moe.dense_and_moe_logprobs(None, rows, {}, False, torch.bfloat16, **fields)
    stock, _ = moe.dense_and_moe_logprobs(None, rows, {}, False, torch.bfloat16, False, **fields)
    assert (stock != expected).any() and (stock - expected).abs().mean() < 0.1
    for how, sp in ((dict(ep=2), False), (dict(tp=2), False), (dict(tp=2), True), (dict(tp=2, ep=2, etp=1), True)):
        run = partial(moe.dense_and_moe_logprobs, **fields)
        for result, indices in two.run(2, run, rows, how, sp, torch.bfloat16):
            assert_bitwise_equal(result, select_rows(expected, rows, indices), f"{kind}, {how}")
    with torch.compiler.set_stance("force_eager"):
        ours, its = (
            moe.dense_and_moe_gradients(None, rows, torch.float32, patched, **fields) for patched in (True, False)
        )
    assert ours.keys() == its.keys()
    for name, gradient in its.items():
        assert ((ours[name] - gradient).norm() / gradient.norm()).item() < 1e-4, name


def test_load_balancing_losses_change_only_gradients(moe_checkpoint, rows, alone, world):
    """The change equals stock Megatron's; the gradients do not, because its loss includes the padded vocabulary."""
    path, dtype = moe_checkpoint(torch.float32), torch.float32
    names = [f"model.layers.{i}.mlp.gate.weight" for i in range(2)]

    def gradients(**how):
        return moe.step(None, path, dtype, rows[:2], {}, packed=False, **how)[0]

    with torch.compiler.set_stance("force_eager"):
        plain, stock = gradients(), gradients(patched=False)
        for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss", ["aux_loss", "global_aux_loss"], "z"):
            fields = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.1}
            if isinstance(kind, list):
                fields["moe_aux_loss_coeff"] = [0.1, 0.05]
            if kind == "z":
                fields = {"moe_z_loss_coeff": 0.1}
            given = moe.training_logprobs(None, path, dtype, rows[:2], **fields)
            assert_bitwise_equal(given, select_rows(alone(dtype)["padded"], rows, [0, 1]), kind)
            ours, its = gradients(**fields), gradients(patched=False, **fields)
            for name in names:
                added, wanted = ours[name] - plain[name], its[name] - stock[name]
                assert wanted.norm() > 0.01 * plain[name].norm(), kind
                assert ((added - wanted).norm() / wanted.norm()).item() < 1e-3, kind


def test_expert_bias_is_updated_and_changes_the_routing(moe_checkpoint, rows, world):
    """Megatron updates the bias from the token counts of the experts."""
    fields = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.125,
    }
    path = moe_checkpoint()
    counts, biases, first, second = moe.expert_bias_step(None, path, torch.bfloat16, rows, fields)
    for count, bias, chosen in zip(counts, biases, first, strict=True):
        assert count.tolist() == chosen.sum(0).tolist()
        mean = count.sum() / len(count)
        assert bias.tolist() == (0.125 * (mean - count).sign()).tolist()
    assert (first != second).any()


def test_recomputation_changes_no_gradient(moe_checkpoint, rows, world, two):
    path, dtype = moe_checkpoint(), torch.bfloat16
    selective = {"recompute_granularity": "selective"}
    kinds = {
        "full uniform": RECOMPUTE_CONFIGS["full uniform"],
        "moe": selective | {"recompute_modules": ["moe", "core_attn"]},
    }
    layouts = {"one": lambda **f: [moe.step(None, path, dtype, rows, {}, **f)]}
    layouts["uneven"] = lambda **f: two.run(2, partial(moe.step, **f), path, dtype, rows, dict(ep=2))
    for called, run in layouts.items():
        expected = run()
        for kind, fields in kinds.items():
            for (grads, _), (wanted, _) in zip(run(**fields), expected, strict=True):
                for name, g in wanted.items():
                    assert_bitwise_equal(grads[name], g, f"{called}, {kind}: {name}")


def test_distributed_optimizer_gives_the_weights_of_the_plain_one(moe_checkpoint, rows, two):
    """With overlap, it gathers weights during the forward; covers replicated and expert-parallel experts."""
    for how in ({}, dict(ep=2)):
        given = moe_checkpoint(layers=1, experts=4), torch.bfloat16, rows, how
        plain = two.run(2, partial(layouts.data_parallel, distributed=False), *given)
        overlapped = two.run(2, partial(layouts.data_parallel, overlap=True), *given)
        for (losses, weights), (wanted, its) in zip(overlapped, plain, strict=True):
            assert losses == wanted and losses[0] != losses[1]
            for name, weight in weights.items():
                assert_bitwise_equal(weight, its[name], name)


def test_context_and_pipeline_parallelism_give_the_bits_of_one_rank(moe_checkpoint, rows, alone, two):
    path, dtype = moe_checkpoint(), torch.bfloat16
    expected = alone(dtype)["padded"]
    results = two.run(2, layouts.context, path, dtype, rows, dict(cp=2, ep=2), {})
    place, logp = (torch.cat([outputs[i] for outputs, *_ in results]) for i in (0, 1))
    cooled = alone(dtype)["logprobs at 0.7"]
    assert_bitwise_equal(logp[place.argsort()], cooled, "context")
    outputs, _ = two.run(2, layouts.pipeline, path, dtype, rows, dict(pp=2), {})[1]
    got = torch.cat([logp for _, logp in outputs])
    assert_bitwise_equal(got, select_rows(expected, rows, [0, 2, 1, 3]), "pipeline")
    # One stage has only a dense layer, the other only an MoE layer.
    path = moe_checkpoint(dense_layers=(0,), dense_intermediate=192)
    expected = torch.cat([moe_reference.logprobs(path, row[:1], row[1:]) for row in rows])
    outputs, _ = two.run(2, layouts.pipeline, path, dtype, rows, dict(pp=2), {})[1]
    got = torch.cat([logp for _, logp in outputs])
    assert_bitwise_equal(got, select_rows(expected, rows, [0, 2, 1, 3]), "pipeline")


@pytest.mark.parametrize("arch", FAMILY_SIZES)
def test_exported_weights_equal_the_checkpoint(arch, moe_checkpoint, two):
    path = moe_checkpoint(arch=arch, **FAMILY_SIZES[arch])
    held = Checkpoint(path)
    for how in (dict(ep=2), dict(tp=2), dict(tp=2, ep=2, etp=1)):
        for weights in two.run(2, moe.whole_weights, path, torch.bfloat16, how):
            assert weights.keys() == set(held)
            for name, weight in weights.items():
                assert_bitwise_equal(weight, held[name], name)


@pytest.mark.parametrize("arch", FAMILY_SIZES)
def test_distributed_checkpoints_load_in_another_layout(arch, moe_checkpoint, two, tmp_path):
    """Covers both directions between expert and tensor parallelism."""
    path = moe_checkpoint(arch=arch, **FAMILY_SIZES[arch])
    held = Checkpoint(path)
    for i, (before, after) in enumerate([(dict(ep=2), dict(tp=2)), (dict(tp=2), dict(ep=2))]):
        folder = tmp_path / str(i)
        folder.mkdir()
        two.run(2, moe.save_checkpoint, path, torch.bfloat16, before, folder)
        for weights in two.run(2, moe.load_checkpoint, path, torch.bfloat16, after, folder):
            for name, weight in weights.items():
                assert_bitwise_equal(weight, held[name], name)


def test_undo_restores_stock_megatron(moe_checkpoint, rows, alone, world):
    before, between, after, same, changed, aligned = moe.patch_and_undo(None, moe_checkpoint(), torch.bfloat16, rows)
    assert_bitwise_equal(after, before)
    assert_bitwise_equal(between, alone(torch.bfloat16)["padded"])
    assert same and changed
    assert aligned["decoder.layers.0.mlp"] == aligned["decoder.layers.1.mlp.experts"] == "moe_experts"
    assert aligned["decoder.layers.0.mlp.router"] == "moe_router"


@pytest.mark.parametrize("how", [dict(ep=2), dict(tp=2, ep=2, etp=1)], ids=["data-parallel", "tensor-parallel"])
def test_invalid_input_on_one_rank_raises_on_both_ranks(how, moe_checkpoint, two):
    for raised in two.run(2, moe.wrong_on_one_rank, moe_checkpoint(), how):
        for what in moe.WRONG:
            kind, message = raised[what]
            assert kind in ("InputError", "UnsupportedError") and what.split(":")[0] in message, (what, message)


def test_four_ranks_give_the_bits_of_one(moe_checkpoint, rows, world, four):
    """Expert-parallel groups span several tensor-parallel groups; invalid input on one rank raises on all."""
    expected, _ = moe.dense_and_moe_logprobs(None, rows, {}, False, torch.bfloat16)
    wider = dict(tp=2, ep=4, etp=1)
    for how, sp in ((dict(tp=2, ep=2, etp=2), True), (wider, True), (wider, False), (dict(tp=1, ep=2, etp=2), False)):
        for result, indices in four.run(4, moe.dense_and_moe_logprobs, rows, how, sp, torch.bfloat16):
            assert_bitwise_equal(result, select_rows(expected, rows, indices), f"{how}")
    for raised in four.run(4, moe.wrong_on_one_rank, moe_checkpoint(), wider):
        assert raised.keys() == moe.WRONG.keys()


UNSUPPORTED = {
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
    "moe_token_dropping": True,
    "moe_apply_probs_on_input": True,
    "moe_latent_size": 64,
    "moe_input_jitter_eps": 0.1,
    "moe_router_force_load_balancing": True,
    "moe_router_force_biased": 1.0,
    "moe_enable_routing_replay": True,
    "moe_router_load_balancing_type": "sinkhorn",
    "moe_router_score_function": "sqrtsoftplus",
    "moe_router_group_topk": 2,
    "moe_router_padding_for_quantization": True,
    "moe_mlp_glu_interleave_size": 32,
    "moe_single_grouped_weight": True,
    "moe_use_legacy_grouped_gemm": True,
    "moe_expert_rank_capacity_factor": 1.5,
    "expert_model_parallel_size": 3,
    "overlap_moe_expert_parallel_comm": True,
    "use_grouped_gemm_for_shared_expert": True,
}


def test_unsupported_moe_fields_are_rejected_and_others_change_no_bit(moe_checkpoint, world):
    tokens = torch.tensor([[1, 2, 3, 4]])
    with patch_megatron(300), torch.no_grad():
        model = moe.build(moe_checkpoint(), torch.bfloat16)
        expected = model(tokens, None, None)
        for field, value in UNSUPPORTED.items():
            if not hasattr(model.config, field):
                continue
            with workers._attribute(model.config, field, value), pytest.raises(UnsupportedError, match=field):
                model(tokens, None, None)
        free = {
            "moe_router_dtype": "fp64",
            "moe_permute_fusion": True,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_fusion": True,
            "moe_token_drop_policy": "position",
            "moe_enable_deepep": True,
        }
        for field, value in free.items():
            with workers._attribute(model.config, field, value):
                assert_bitwise_equal(model(tokens, None, None), expected, field)


def test_policy_covers_every_moe_field(moe_checkpoint):
    from megatron.core.transformer.transformer_config import TransformerConfig

    from alignkit.megatron.build import transformer_config
    from alignkit.megatron.policy import POLICY, check_config

    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    words = ("moe", "expert", "router")
    assert {name for name in names if any(word in name for word in words)} - POLICY.fields == {
        name for name in names if name.startswith("inference_moe_")
    }
    config = transformer_config(read_architecture(moe_checkpoint()), torch.bfloat16)
    check_config(config)
    for name in ("moe_paged_stash", "moe_pad_experts_for_cuda_graph_inference") if "moe_paged_stash" in names else ():
        with workers._attribute(config, name, True), pytest.raises(UnsupportedError, match=name):
            check_config(config)


def test_layouts_with_wrong_gradients_in_megatron_are_rejected_in_training(moe_checkpoint, rows, two):
    path, dtype = moe_checkpoint(), torch.bfloat16
    right = two.run(2, moe.step, path, dtype, rows, *LAYOUTS["sequence parallel, experts sharded"])[0][0]
    for called, (how, sequence_parallel) in LAYOUTS.items():
        if called in TRAINED:
            continue
        named = "expert_tensor_parallel_size" if sequence_parallel else "sequence_parallel"
        for outcome in two.outcomes(2, moe.step, path, dtype, rows, how, sequence_parallel):
            if isinstance(outcome, Failed):
                assert outcome.kind is UnsupportedError and outcome.message.startswith(named), (called, outcome.message)
                continue
            assert sequence_parallel  # this Megatron-core version reduces these experts' gradients
            for name, g in right.items():
                assert ((outcome[0][name] - g).norm() / g.norm()).item() < 0.1, name
