"""Mixtures of experts under real Megatron-core: the same bits in every layout, and gradients against float64."""

import dataclasses
import itertools
from functools import partial

import pytest
import torch

from alignkit.convert import Checkpoint, read_architecture
from alignkit.errors import UnsupportedError
from alignkit.megatron import patch_megatron
from alignkit.testing import Failed, assert_bitwise_equal
from tests.megatron import layouts, mixtures, reference, workers
from tests.megatron.test_gradients import bound
from tests.megatron.test_recompute import RECOMPUTED
from tests.vllm import moe

SIZES = dict(intermediate=128, experts=8, top_k=2)
DENSE = dict(layers=3, dense_layers=(1,), dense_intermediate=192)
"""A layer without experts between two mixtures."""
OF_FAMILY = {"qwen3_moe": {}, "qwen2_moe": DENSE, "glm4_moe": {}}
LAYOUTS = {
    "two data-parallel ranks, experts on each": (dict(ep=2), False),
    "tensor parallel, experts cut": (dict(tp=2), False),
    "tensor parallel, experts on each": (dict(tp=2, ep=2, etp=1), False),
    "tensor parallel, all experts on both": (dict(tp=2, etp=1), False),
    "sequence parallel, experts cut": (dict(tp=2), True),
    "sequence parallel, experts on each": (dict(tp=2, ep=2, etp=1), True),
    "sequence parallel, all experts on both": (dict(tp=2, etp=1), True),
}
"""`layouts.layout`'s and whether with sequence parallelism; of two ranks, all with other groups for experts."""

TRAINED = [name for name, (how, sp) in LAYOUTS.items() if how == dict(ep=2) or (sp and how != dict(tp=2, etp=1))]
"""Those that every version of Megatron has right gradients for."""


@pytest.fixture(scope="module")
def mixture(checkpoint):
    def make(dtype=torch.bfloat16, arch="qwen3_moe", **sizes):
        return checkpoint(arch, dtype, **(SIZES | sizes))

    return make


@pytest.fixture(scope="module")
def alone(mixture, rows, world):
    """Way -> the logprobs on one rank, by dtype."""
    made = {}

    def of(dtype):
        if dtype not in made:
            made[dtype] = mixtures.every_way(None, mixture(dtype), dtype, rows, {})[0]
        return made[dtype]

    return of


def of_rows(values, rows, which):
    parts = values.split([len(row) - 1 for row in rows])
    return torch.cat([parts[i] for i in which])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_every_way_gives_the_same_bits(dtype, mixture, rows, alone, two):
    expected = alone(dtype)
    for way in ("one", "padded", "packed", "loss call", "logits", "logprobs at 1.0"):
        assert_bitwise_equal(expected[way], expected["one"], way)
    for called, (how, sequence_parallel) in LAYOUTS.items():
        if dtype == torch.float32 and not sequence_parallel and how != dict(ep=2):
            continue
        for result, which in two.run(2, mixtures.every_way, mixture(dtype), dtype, rows, how, sequence_parallel):
            for way, value in result.items():
                assert_bitwise_equal(value, of_rows(expected[way], rows, which), f"{called}: {way}")


GLM = dict(layers=3, dense_layers=(0, 1), dense_intermediate=192, options=("attention_bias",), top_k=2)
"""As GLM-4.5-Air: biases of q, k and v, and no norms of q and k."""
OTHERS = {
    "qwen2_moe bf16": ("qwen2_moe", torch.bfloat16, DENSE),
    "qwen2_moe fp32": ("qwen2_moe", torch.float32, DENSE),
    "glm4_moe bf16": ("glm4_moe", torch.bfloat16, GLM),
    "glm4_moe fp32, groups, norms of q and k": (
        "glm4_moe",
        torch.float32,
        {"groups": 4, "top_groups": 1, "options": ("use_qk_norm",), "rotary_factor": 0.25},
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_the_ops_give_on_whole_weights(kind, mixture, rows, world, two):
    """Of families that vLLM's engine is compared with in the same way, with layers without experts, in every layout."""
    arch, dtype, sizes = OTHERS[kind]
    path = mixture(dtype, arch, **sizes)
    expected, _ = mixtures.every_way(None, path, dtype, rows, {})
    composed = torch.cat([moe.logprobs(path, row[:1], row[1:]) for row in rows])
    for way in ("one", "padded", "packed", "loss call"):
        assert_bitwise_equal(expected[way], composed, way)
    for called, (how, sequence_parallel) in LAYOUTS.items():
        if dtype == torch.float32 and called not in TRAINED:
            continue
        for result, which in two.run(2, mixtures.every_way, path, dtype, rows, how, sequence_parallel):
            for way in ("padded", "packed"):
                assert_bitwise_equal(result[way], of_rows(composed, rows, which), f"{called}: {way}")


def test_a_shared_expert_that_is_not_what_the_configuration_says(mixture, world):
    tokens = torch.tensor([[1, 2, 3, 4]])
    with patch_megatron(300), torch.no_grad():
        model = mixtures.build(mixture(arch="qwen2_moe"), torch.bfloat16)
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


def test_stock_does_not(mixture, rows, alone, two):
    """So the test above can fail."""
    path, dtype = mixture(), torch.bfloat16
    one_rank = mixtures.stock(None, path, dtype, rows, {})
    for called in ("tensor parallel, experts cut", "sequence parallel, experts on each"):
        other = two.run(2, mixtures.stock, path, dtype, rows, *LAYOUTS[called])[0]
        assert (other != one_rank).any(), called
    assert (one_rank != alone(dtype)["padded"]).any()


def test_experts_without_normalized_weights(mixture, rows, world, two):
    path = mixture(normalize_top_k=False)
    expected, _ = mixtures.every_way(None, path, torch.bfloat16, rows, {})
    for result, which in two.run(2, mixtures.every_way, path, torch.bfloat16, rows, dict(ep=2)):
        assert_bitwise_equal(result["packed"], of_rows(expected["one"], rows, which))


def relative_error(gradient, wanted):
    """Of an expert that no token goes to, 0 if it has none."""
    return ((gradient.double() - wanted).norm() / wanted.norm()).item() if wanted.any() else float(gradient.any())


@pytest.mark.parametrize("arch", OF_FAMILY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_one_step_agrees_with_float64(dtype, arch, mixture, rows, world, two):
    """The reference has the experts that were chosen; its own choice differs where two experts are as good."""
    path = mixture(dtype, arch, **OF_FAMILY[arch])
    arch = read_architecture(path)
    width = max(arch.top_k * arch.intermediate + arch.shared_intermediate, arch.dense_intermediate)
    most = bound(dataclasses.replace(arch, intermediate=width), dtype)
    grads, chosen = mixtures.step(None, path, dtype, rows, {})
    again, _ = mixtures.step(None, path, dtype, rows, {})
    weights = reference.weights64(Checkpoint(path))
    assert [name for name in weights if name not in grads] == [name for name in weights if name.endswith("_bias")]
    for name in weights.keys() - grads.keys():  # of the choice: it has no gradient
        weights[name].requires_grad_(False)
    trained = {name: w for name, w in weights.items() if name in grads}
    starts = torch.tensor([0, *(len(row) - 1 for row in rows)]).cumsum(0).tolist()
    parts = [chosen[:, a:b] for a, b in itertools.pairwise(starts)]
    logp = [reference.logprobs(arch, weights, row, mine) for row, mine in zip(rows, parts, strict=True)]
    (-torch.cat(logp).mean()).backward()
    for name, w in trained.items():
        assert_bitwise_equal(again[name], grads[name], name)
        error = relative_error(grads[name], w.grad)
        assert error < most, f"{name} is off by {error:.2e}, more than {most:.2e}"
    for called, (how, sequence_parallel) in LAYOUTS.items():
        if called not in TRAINED:
            continue
        for other, _ in two.run(2, mixtures.step, path, dtype, rows, how, sequence_parallel):
            for name, w in trained.items():
                error = relative_error(other[name], w.grad)
                assert error < most, f"{called}: {name} is off by {error:.2e}, more than {most:.2e}"


def test_gradients_of_experts_are_the_same_bytes(mixture, rows, world, two):
    """Of one global batch, whichever ranks have its tokens and the experts."""
    path, dtype = mixture(), torch.bfloat16
    expected = mixtures.step(None, path, dtype, [*rows[::2], *rows[1::2]], {}, bare=True)[0]
    of_experts = [name for name in expected if ".experts." in name]
    for grads, _ in two.run(2, mixtures.step, path, dtype, rows, dict(ep=2), False, True, True):
        for name in of_experts:
            assert_bitwise_equal(grads[name], expected[name], name)
    # Tensor-parallel ranks add what flows back to a dense layer, and to experts that they cut: it is the same before.
    each, cut = (
        two.run(2, mixtures.step, path, dtype, rows, *LAYOUTS[f"sequence parallel, experts {how}"], True, True)[0][0]
        for how in ("on each", "cut")
    )
    for name in of_experts:
        if ".layers.1." in name:
            assert expected[name].any()
            assert_bitwise_equal(each[name], cut[name], name)


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
def test_mixtures_of_other_parts(kind, rows, world, two):
    """A dense layer, then a mixture with a shared expert, or with groups of experts."""
    fields = SHARED[kind]
    expected, _ = mixtures.of_parts_logprobs(None, rows, {}, False, torch.bfloat16, **fields)
    stock, _ = mixtures.of_parts_logprobs(None, rows, {}, False, torch.bfloat16, False, **fields)
    assert (stock != expected).any() and (stock - expected).abs().mean() < 0.1
    for how, sp in ((dict(ep=2), False), (dict(tp=2), False), (dict(tp=2), True), (dict(tp=2, ep=2, etp=1), True)):
        run = partial(mixtures.of_parts_logprobs, **fields)
        for result, which in two.run(2, run, rows, how, sp, torch.bfloat16):
            assert_bitwise_equal(result, of_rows(expected, rows, which), f"{kind}, {how}")
    with torch.compiler.set_stance("force_eager"):
        ours, its = (
            mixtures.of_parts_gradients(None, rows, torch.float32, patched, **fields) for patched in (True, False)
        )
    assert ours.keys() == its.keys()
    for name, gradient in its.items():
        assert ((ours[name] - gradient).norm() / gradient.norm()).item() < 1e-4, name


def test_losses_that_balance_experts_change_gradients_alone(mixture, rows, alone, world):
    """By as much as in Megatron as it comes, whose loss is another: it counts the padded vocabulary."""
    path, dtype = mixture(torch.float32), torch.float32
    names = [f"model.layers.{i}.mlp.gate.weight" for i in range(2)]

    def gradients(**how):
        return mixtures.step(None, path, dtype, rows[:2], {}, packed=False, **how)[0]

    with torch.compiler.set_stance("force_eager"):
        plain, stock = gradients(), gradients(patched=False)
        for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss", ["aux_loss", "global_aux_loss"], "z"):
            fields = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.1}
            if isinstance(kind, list):
                fields["moe_aux_loss_coeff"] = [0.1, 0.05]
            if kind == "z":
                fields = {"moe_z_loss_coeff": 0.1}
            given = mixtures.trained(None, path, dtype, rows[:2], **fields)
            assert_bitwise_equal(given, of_rows(alone(dtype)["padded"], rows, [0, 1]), kind)
            ours, its = gradients(**fields), gradients(patched=False, **fields)
            for name in names:
                added, wanted = ours[name] - plain[name], its[name] - stock[name]
                assert wanted.norm() > 0.01 * plain[name].norm(), kind
                assert ((added - wanted).norm() / wanted.norm()).item() < 1e-3, kind


def test_a_bias_that_balances_experts(mixture, rows, world):
    """Megatron counts the tokens of each expert and moves the bias; the choice heeds it."""
    fields = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.125,
    }
    path = mixture()
    counts, biases, first, second = mixtures.biased(None, path, torch.bfloat16, rows, fields)
    for count, bias, chosen in zip(counts, biases, first, strict=True):
        assert count.tolist() == chosen.sum(0).tolist()
        mean = count.sum() / len(count)
        assert bias.tolist() == (0.125 * (mean - count).sign()).tolist()
    assert (first != second).any()


def test_recomputation_changes_no_gradient(mixture, rows, world, two):
    path, dtype = mixture(), torch.bfloat16
    selective = {"recompute_granularity": "selective"}
    kinds = {"full uniform": RECOMPUTED["full uniform"], "moe": selective | {"recompute_modules": ["moe", "core_attn"]}}
    layouts = {"one": lambda **f: [mixtures.step(None, path, dtype, rows, {}, **f)]}
    layouts["uneven"] = lambda **f: two.run(2, partial(mixtures.step, **f), path, dtype, rows, dict(ep=2))
    for called, run in layouts.items():
        expected = run()
        for kind, fields in kinds.items():
            for (grads, _), (wanted, _) in zip(run(**fields), expected, strict=True):
                for name, g in wanted.items():
                    assert_bitwise_equal(grads[name], g, f"{called}, {kind}: {name}")


def test_the_distributed_optimizer(mixture, rows, two):
    """Of experts on each rank, and of all on both: it gathers weights while the forward runs."""
    for how in ({}, dict(ep=2)):
        given = mixture(layers=1, experts=4), torch.bfloat16, rows, how
        plain = two.run(2, partial(layouts.data_parallel, distributed=False), *given)
        overlapped = two.run(2, partial(layouts.data_parallel, overlap=True), *given)
        for (losses, weights), (wanted, its) in zip(overlapped, plain, strict=True):
            assert losses == wanted and losses[0] != losses[1]
            for name, weight in weights.items():
                assert_bitwise_equal(weight, its[name], name)


def test_context_and_pipeline_parallelism(mixture, rows, alone, two):
    path, dtype = mixture(), torch.bfloat16
    expected = alone(dtype)["padded"]
    results = two.run(2, layouts.context, path, dtype, rows, dict(cp=2, ep=2), {})
    place, logp = (torch.cat([said[i] for said, *_ in results]) for i in (0, 1))
    cooled = alone(dtype)["logprobs at 0.7"]
    assert_bitwise_equal(logp[place.argsort()], cooled, "context")
    said, _ = two.run(2, layouts.pipeline, path, dtype, rows, dict(pp=2), {})[1]
    got = torch.cat([logp for _, logp in said])
    assert_bitwise_equal(got, of_rows(expected, rows, [0, 2, 1, 3]), "pipeline")
    # A stage without experts, and one of experts alone.
    path = mixture(dense_layers=(0,), dense_intermediate=192)
    expected = torch.cat([moe.logprobs(path, row[:1], row[1:]) for row in rows])
    said, _ = two.run(2, layouts.pipeline, path, dtype, rows, dict(pp=2), {})[1]
    got = torch.cat([logp for _, logp in said])
    assert_bitwise_equal(got, of_rows(expected, rows, [0, 2, 1, 3]), "pipeline")


@pytest.mark.parametrize("arch", OF_FAMILY)
def test_weights_over_ranks(arch, mixture, two):
    path = mixture(arch=arch, **OF_FAMILY[arch])
    held = Checkpoint(path)
    for how in (dict(ep=2), dict(tp=2), dict(tp=2, ep=2, etp=1)):
        for weights in two.run(2, mixtures.whole_weights, path, torch.bfloat16, how):
            assert weights.keys() == set(held)
            for name, weight in weights.items():
                assert_bitwise_equal(weight, held[name], name)


@pytest.mark.parametrize("arch", OF_FAMILY)
def test_distributed_checkpoints(arch, mixture, two, tmp_path):
    """Saved by expert-parallel ranks, loaded by tensor-parallel ones, and the other way round."""
    path = mixture(arch=arch, **OF_FAMILY[arch])
    held = Checkpoint(path)
    for i, (before, after) in enumerate([(dict(ep=2), dict(tp=2)), (dict(tp=2), dict(ep=2))]):
        folder = tmp_path / str(i)
        folder.mkdir()
        two.run(2, mixtures.saved, path, torch.bfloat16, before, folder)
        for weights in two.run(2, mixtures.loaded, path, torch.bfloat16, after, folder):
            for name, weight in weights.items():
                assert_bitwise_equal(weight, held[name], name)


def test_undo_gives_stock_back(mixture, rows, alone, world):
    before, between, after, same, changed, aligned = mixtures.undone(None, mixture(), torch.bfloat16, rows)
    assert_bitwise_equal(after, before)
    assert_bitwise_equal(between, alone(torch.bfloat16)["padded"])
    assert same and changed
    assert aligned["decoder.layers.0.mlp"] == aligned["decoder.layers.1.mlp.experts"] == "moe_experts"
    assert aligned["decoder.layers.0.mlp.router"] == "moe_router"


@pytest.mark.parametrize("how", [dict(ep=2), dict(tp=2, ep=2, etp=1)], ids=["data-parallel", "tensor-parallel"])
def test_one_rank_of_two(how, mixture, two):
    """Both raise the same kind, and the next forward of both is right."""
    for raised in two.run(2, mixtures.wrong_on_one_rank, mixture(), how):
        for what in mixtures.WRONG:
            kind, message = raised[what]
            assert kind in ("InputError", "UnsupportedError") and what.split(":")[0] in message, (what, message)


def test_four_ranks(mixture, rows, world, four):
    """Groups of experts that are wider than those of tensor-parallel ranks, and cross them; and what one rank refuses."""
    expected, _ = mixtures.of_parts_logprobs(None, rows, {}, False, torch.bfloat16)
    wider = dict(tp=2, ep=4, etp=1)
    for how, sp in ((dict(tp=2, ep=2, etp=2), True), (wider, True), (wider, False), (dict(tp=1, ep=2, etp=2), False)):
        for result, which in four.run(4, mixtures.of_parts_logprobs, rows, how, sp, torch.bfloat16):
            assert_bitwise_equal(result, of_rows(expected, rows, which), f"{how}")
    for raised in four.run(4, mixtures.wrong_on_one_rank, mixture(), wider):
        assert raised.keys() == mixtures.WRONG.keys()


REFUSED = {
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


def test_fields_that_are_refused(mixture, world):
    tokens = torch.tensor([[1, 2, 3, 4]])
    with patch_megatron(300), torch.no_grad():
        model = mixtures.build(mixture(), torch.bfloat16)
        expected = model(tokens, None, None)
        for field, value in REFUSED.items():
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


def test_every_field_of_mixtures_is_decided(mixture):
    from megatron.core.transformer.transformer_config import TransformerConfig

    from alignkit.megatron.build import transformer_config
    from alignkit.megatron.policy import POLICY, check_config

    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    words = ("moe", "expert", "router")
    assert {name for name in names if any(word in name for word in words)} - POLICY.fields == {
        name for name in names if name.startswith("inference_moe_")
    }
    config = transformer_config(read_architecture(mixture()), torch.bfloat16)
    check_config(config)
    for name in ("moe_paged_stash", "moe_pad_experts_for_cuda_graph_inference") if "moe_paged_stash" in names else ():
        with workers._attribute(config, name, True), pytest.raises(UnsupportedError, match=name):
            check_config(config)


def test_layouts_that_megatron_does_not_train(mixture, rows, two):
    path, dtype = mixture(), torch.bfloat16
    right = two.run(2, mixtures.step, path, dtype, rows, *LAYOUTS["sequence parallel, experts cut"])[0][0]
    for called, (how, sequence_parallel) in LAYOUTS.items():
        if called in TRAINED:
            continue
        named = "expert_tensor_parallel_size" if sequence_parallel else "sequence_parallel"
        for outcome in two.outcomes(2, mixtures.step, path, dtype, rows, how, sequence_parallel):
            if isinstance(outcome, Failed):
                assert outcome.kind is UnsupportedError and outcome.message.startswith(named), (called, outcome.message)
                continue
            assert sequence_parallel  # a version of Megatron that adds these experts' gradients
            for name, g in right.items():
                assert ((outcome[0][name] - g).norm() / g.norm()).item() < 0.1, name
