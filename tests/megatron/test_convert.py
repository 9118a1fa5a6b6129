"""Conversion of HF configs and weights to Megatron's layout and back, for every model family.

configs.json holds published config.json files, which transformers must read in the same way; a new family adds one.
Megatron-core is not needed.
"""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from alignkit.convert import Checkpoint, check_weights, merge_qkv, read_architecture, split_qkv, to_hf, to_megatron
from alignkit.errors import InputError, UnsupportedError
from alignkit.models import ARCHITECTURES, FAMILIES
from tests.ropes import ROPES


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", FAMILIES)
def test_round_trip_returns_the_hf_weights(arch, tied, tp, checkpoint):
    path = checkpoint(arch, torch.bfloat16, tied)
    shape, weights = read_architecture(path), Checkpoint(path)
    shards = [to_megatron(shape, weights, tp_rank=r, tp_size=tp) for r in range(tp)]
    assert shards[0]["embedding.word_embeddings.weight"].shape[0] == {1: 384, 2: 256}[tp]
    assert ("output_layer.weight" in shards[0]) is not tied
    back = dict(to_hf(shape, shards[0], lambda name: [shard[name] for shard in shards]))
    assert back.keys() == set(weights)
    for name, tensor in back.items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("arch", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("grouped", [False, True])
def test_experts_are_sharded_by_expert_and_expert_tensor_parallel_rank(grouped, arch, checkpoint):
    """Each expert-parallel rank has consecutive experts; other weights do not depend on these ranks."""
    path = checkpoint(arch, experts=6, intermediate=64)
    shape, weights = read_architecture(path), Checkpoint(path)
    held = [
        to_megatron(
            shape,
            weights,
            ep_rank=ep,
            ep_size=2,
            expert_tp_rank=tp,
            expert_tp_size=2,
            fused_norms=grouped,
            grouped_experts=grouped,
        )
        for ep in range(2)
        for tp in range(2)
    ]
    experts = "decoder.layers.1.mlp.experts."
    name = experts + ("linear_fc1.weight1" if grouped else "local_experts.1.linear_fc1.weight")
    gate, up = (weights[f"model.layers.1.mlp.experts.4.{part}_proj.weight"] for part in ("gate", "up"))
    # EP rank 1, expert TP rank 1: second half of its second expert.
    assert torch.equal(held[3][name], torch.cat([gate[32:], up[32:]]))
    assert len([name for name in held[0] if name.startswith(experts)]) == 2 * 3
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in held[0]  # MoE layers have no linear to fuse the norm into

    def shards(name):
        return [part[name] for part in held] if ".experts." in name else [held[0][name]]

    back = dict(to_hf(shape, held[0], shards, ep_size=2))
    assert back.keys() == set(weights) and all(torch.equal(back[name], weights[name]) for name in back)


@pytest.mark.parametrize("arch", ["qwen2_moe", "qwen3_moe"])
def test_dense_layers_of_moe_models_are_sharded_by_tensor_parallel_rank(arch, checkpoint):
    """With fused norms, their first linear contains the norm, as in a dense model."""
    path = checkpoint(arch, layers=3, experts=4, intermediate=64, dense_layers=[0, 2], dense_intermediate=96)
    shape, weights = read_architecture(path), Checkpoint(path)
    assert (shape.dense_layers, shape.dense_intermediate, shape.intermediate) == ((0, 2), 96, 64)
    for fused in (False, True):
        held = [
            to_megatron(shape, weights, tp_rank=r, tp_size=2, ep_rank=r, ep_size=2, expert_tp_rank=0, expert_tp_size=1,
                        fused_norms=fused, grouped_experts=fused)
            for r in range(2)
        ]  # fmt: skip
        gate, up, down = (weights[f"model.layers.2.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        assert torch.equal(held[1]["decoder.layers.2.mlp.linear_fc1.weight"], torch.cat([gate[48:], up[48:]]))
        assert torch.equal(held[0]["decoder.layers.2.mlp.linear_fc2.weight"], down[:, :48])
        assert [f"decoder.layers.{i}.mlp.router.weight" in held[0] for i in range(3)] == [False, True, False]
        alone = [f"decoder.layers.{i}.pre_mlp_layernorm.weight" in held[0] for i in range(3)]
        assert alone == ([False, True, False] if fused else [True, True, True])

        def shards(name, held=held):
            whole = ".router." in name or "norm" in name or "gate_weight" in name
            return [held[0][name]] if whole else [part[name] for part in held]

        back = dict(to_hf(shape, held[0], shards, ep_size=2))
        assert back.keys() == set(weights) and all(torch.equal(back[name], weights[name]) for name in back)


@pytest.mark.parametrize(
    "ranks, error, named",
    [
        ({"ep_size": 4}, UnsupportedError, "ep: must divide the 6 experts, got 4"),
        ({"ep_size": 2, "ep_rank": 2}, InputError, "ep_rank"),
        ({"expert_tp_size": 2, "expert_tp_rank": -1}, InputError, "expert_tp_rank"),
    ],
)
def test_invalid_expert_ranks_are_rejected(ranks, error, named, checkpoint):
    path = checkpoint("qwen3_moe", experts=6, intermediate=64)
    with pytest.raises(error, match=f"^{named}"):
        to_megatron(read_architecture(path), Checkpoint(path), **ranks)


def test_fused_norms_are_stored_in_the_next_linear(checkpoint):
    """Fused names follow TransformerEngine's layer spec; tensors and the round trip are unchanged."""
    shape, weights = read_architecture(checkpoint("qwen3")), Checkpoint(checkpoint("qwen3"))
    local, fused = (to_megatron(shape, weights, fused_norms=fused) for fused in (False, True))
    assert local.keys() - fused.keys() == {
        f"decoder.layers.{i}.{norm}.weight" for i in (0, 1) for norm in ("input_layernorm", "pre_mlp_layernorm")
    }
    norm, within = "decoder.layers.1.pre_mlp_layernorm.weight", "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"
    assert torch.equal(fused[within], local[norm]) and len(fused) == len(local)
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in fused
    back = dict(to_hf(shape, fused, lambda name: [fused[name]]))
    assert back.keys() == set(weights) and all(torch.equal(back[name], weights[name]) for name in back)


def test_qkv_rows_are_grouped_by_kv_head_and_gate_precedes_up(checkpoint):
    """Rows of a GQA group are contiguous; a rank's gate rows precede its up rows."""
    shape = read_architecture(checkpoint("qwen3"))
    d, group = shape.head_dim, shape.heads // shape.kv_heads
    q, k, v = (
        torch.arange(n * d) + start for n, start in ((shape.heads, 0), (shape.kv_heads, 1000), (shape.kv_heads, 2000))
    )
    merged = merge_qkv(shape, q, k, v).view(shape.kv_heads, group + 2, d)
    assert merged[1, 0, 0] == group * d and merged[1, group, 0] == 1000 + d and merged[1, -1, 0] == 2000 + d
    assert all(torch.equal(a, b) for a, b in zip(split_qkv(shape, merged.flatten()), (q, k, v), strict=True))
    weights = Checkpoint(checkpoint("qwen3"))
    fc1 = to_megatron(shape, weights, tp_rank=1, tp_size=2)["decoder.layers.0.mlp.linear_fc1.weight"]
    gate, up = (weights[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    assert torch.equal(fc1, torch.cat([gate[256:], up[256:]]))


def test_sharded_files_give_the_same_tensors_in_the_requested_dtype(checkpoint, tmp_path):
    path = checkpoint("llama", torch.bfloat16)
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shape = read_architecture(path)
    one, several = (to_megatron(shape, Checkpoint(p), dtype=torch.float32) for p in (path, tmp_path))
    assert one.keys() == several.keys()
    assert all(v.dtype == torch.float32 and torch.equal(v, several[k]) for k, v in one.items())


PUBLISHED = json.loads((Path(__file__).parent / "configs.json").read_text())


def read(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return read_architecture(directory)


def scaling(rope):
    """Return the fields of the `alignkit.contract.rope` class for transformers' `rope_parameters`, or None."""
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    both = {"factor": rope["factor"], "original_max_position": rope["original_max_position_embeddings"]}
    if kind == "llama3":
        return both | {name: rope[name] for name in ("low_freq_factor", "high_freq_factor")}
    assert kind == "yarn"
    given = {"beta_fast": rope.get("beta_fast", 32.0), "beta_slow": rope.get("beta_slow", 1.0)}
    attention_factor = rope.get("attention_factor") or 0.1 * math.log(rope["factor"]) + 1.0
    return both | given | {"attention_factor": attention_factor, "truncate": rope.get("truncate", True)}


def dense_layers(config):
    """Return the indices of an MoE model's dense layers."""
    listed, step = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", 1)
    listed = (*listed, *range(getattr(config, "first_k_dense_replace", 0)))
    return tuple(i for i in range(config.num_hidden_layers) if i in listed or (i + 1) % step)


def transformers_reads(directory):
    """Return the fields of Architecture as transformers, and therefore vLLM, reads the config."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(directory)
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    glm = config.model_type == "glm4_moe"
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "intermediate": getattr(config, "moe_intermediate_size", config.intermediate_size),
        "experts": getattr(config, "n_routed_experts" if glm else "num_experts", 0),
        "top_k": getattr(config, "num_experts_per_tok", 0),
        "normalize_top_k": getattr(config, "norm_topk_prob", config.model_type == "mixtral"),
        "shared_intermediate": config.n_shared_experts * config.moe_intermediate_size
        if glm
        else getattr(config, "shared_expert_intermediate_size", 0),
        "groups": config.n_group if glm else 1,
        "top_groups": config.topk_group if glm else 1,
        "routed_scale": config.routed_scaling_factor if glm else 1.0,
        "options": tuple(name for name in ("attention_bias", "use_qk_norm") if glm and getattr(config, name)),
        "rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "mtp_layers": config.num_mtp_layers if glm else 0,
        "dense_layers": (dense := dense_layers(config)),
        "dense_intermediate": config.intermediate_size if dense else 0,
        "vocab": config.vocab_size,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "max_position": config.max_position_embeddings,
        "norm_eps": config.rms_norm_eps,
        "rope_base": rope["rope_theta"],
        "rope_scaling": scaling(rope),
        "tied": config.tie_word_embeddings,
        "family": config.model_type,
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_read_as_by_transformers(name, tmp_path):
    config = PUBLISHED[name]
    assert asdict(read(tmp_path, config)) == transformers_reads(tmp_path)


@pytest.mark.parametrize(
    "name", ["Qwen2.5-0.5B", "Qwen3-8B", "Meta-Llama-3-8B", "a Llama saved by Unsloth", "Mistral-7B-Instruct-v0.3"]
)
@pytest.mark.parametrize("change", ["absent", "null"])
def test_missing_field_has_transformers_default_or_is_rejected_by_name(name, change, tmp_path):
    rejected = set()
    for field in PUBLISHED[name]:
        config = {k: v for k, v in PUBLISHED[name].items() if k != field} | ({field: None} if change == "null" else {})
        try:
            ours = asdict(read(tmp_path, config))
        except (InputError, UnsupportedError) as e:
            assert field in str(e)
            rejected.add(field)
        else:
            try:
                theirs = transformers_reads(tmp_path)
            except Exception:
                continue  # transformers rejects the config too
            assert ours == theirs, field
    assert rejected >= {
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "intermediate_size",
        "rms_norm_eps",
        "architectures",
        "model_type",
    }
    assert not rejected & {
        "torch_dtype",
        "use_cache",
        "bos_token_id",
        "transformers_version",
        "attention_dropout",
        "initializer_range",
    }


@pytest.mark.parametrize("family", [name.removesuffix("ForCausalLM") for name in ARCHITECTURES])
@pytest.mark.parametrize("diff", [True, False])
def test_config_saved_by_transformers_is_read_as_by_transformers(family, diff, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, family + "Config")(
        architectures=[family + "ForCausalLM"],
        dtype="bfloat16",
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=2,
        **({"sliding_window": None} if family == "Mistral" else {}),
        **({"head_dim": 64} if family == "Glm4Moe" else {}),
    )
    config.to_json_file(tmp_path / "config.json", use_diff=diff)
    assert asdict(read_architecture(tmp_path)) == transformers_reads(tmp_path)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": ["Qwen3ForCausalLM", "LlamaForCausalLM"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures"),
        ({"architectures": [["Qwen3ForCausalLM"]]}, "architectures"),
        # Layers without RoPE; post-norms, and q and k norms across heads.
        ({"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}, "SmolLM3ForCausalLM"),
        ({"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}, "Olmo2ForCausalLM"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"model_type": "llama"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": ROPES["yarn"] | {"type": "llama3"}}, "llama3"),
        ({"rope_scaling": ROPES["yarn"] | {"mscale": 1.0, "mscale_all_dim": 1.0}}, "mscale"),
        ({"rope_scaling": ROPES["yarn"] | {"attention_factor": 1.0}}, "attention_factor"),
        ({"rope_scaling": ROPES["llama3"] | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": ROPES["llama3"] | {"beta_fast": 32}}, "beta_fast"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "default", "type": "linear"}}, "linear"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 5e5}}, "longrope"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"bias": True}, "bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_act": None}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": [["full_attention"], 3]}, "layer_types"),
        ({"layer_types": 3}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"compression_config": {"format": "int-quantized"}}, "compression_config"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"logit_scale": None}, "logit_scale"),
        ({"is_causal": False}, "is_causal"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"attention_multiplier": 0.0078125}, "attention_multiplier"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"residual_multiplier": 0.22}, "residual_multiplier"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"something_new": 0}, "something_new"),
        ({"something_new": True}, "something_new"),
        ({"text_config": {}}, "text_config"),
        ({"per_layer_config": {"0": {"rms_norm_eps": 1e-5}}}, "per_layer_config"),
        ({"num_experts": 8}, "num_experts"),
    ],
)
def test_unsupported_architecture_is_rejected(change, named, checkpoint, tmp_path):
    config = json.loads((checkpoint() / "config.json").read_text())
    with pytest.raises(UnsupportedError, match=f"^{named}: |: .*{named}"):
        read(tmp_path, config | change)


def test_moe_architecture_is_read(checkpoint, tmp_path):
    path = checkpoint("qwen3_moe", experts=6, top_k=3, normalize_top_k=False)
    arch = read_architecture(path)
    assert (arch.experts, arch.top_k, arch.normalize_top_k, arch.intermediate) == (6, 3, False, 512)
    weights = Checkpoint(path)
    assert weights.header("model.layers.1.mlp.gate.weight")[1] == (6, 256)
    assert weights.header("model.layers.1.mlp.experts.5.down_proj.weight")[1] == (256, 512)
    assert not [name for name in weights if "mlp.gate_proj" in name]
    config = json.loads((path / "config.json").read_text())
    # Published configs also set the width of dense layers, of which there are none, and fields of the loss.
    published = {"intermediate_size": 6144, "router_aux_loss_coef": 0.001, "output_router_logits": False}
    same = {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 512}
    assert read(tmp_path, config | published | same) == arch
    mixtral = read_architecture(checkpoint("mixtral", experts=4, top_k=2))
    assert (mixtral.experts, mixtral.top_k, mixtral.normalize_top_k) == (4, 2, True)
    assert read_architecture(checkpoint()).experts == 0


@pytest.mark.parametrize(
    "change, error, named",
    [
        ({"decoder_sparse_step": 0}, InputError, "decoder_sparse_step"),
        (
            {"decoder_sparse_step": 3},
            UnsupportedError,
            "mlp_only_layers / decoder_sparse_step: at least one layer must have experts",
        ),
        (
            {"mlp_only_layers": [0, 1]},
            UnsupportedError,
            "mlp_only_layers / decoder_sparse_step: at least one layer must have experts",
        ),
        (
            {"mlp_only_layers": [2]},
            InputError,
            r"mlp_only_layers: must be a list of layer indices in \[0, 2\), got \[2\]",
        ),
        ({"mlp_only_layers": [True]}, InputError, "mlp_only_layers"),
        ({"mlp_only_layers": 1}, InputError, "mlp_only_layers"),
        ({"mlp_only_layers": [0]}, InputError, "intermediate_size: required, but missing in "),
        (
            {"mlp_only_layers": [0], "intermediate_size": 0},
            InputError,
            "intermediate_size: must be a positive integer, got 0",
        ),
        ({"first_k_dense_replace": 1}, UnsupportedError, "first_k_dense_replace"),
        ({"shared_expert_intermediate_size": 64}, UnsupportedError, "shared_expert_intermediate_size"),
        ({"num_local_experts": 8}, InputError, "num_experts and num_local_experts"),
        ({"n_shared_experts": 1}, UnsupportedError, "n_shared_experts"),
        ({"num_experts": 0}, InputError, "num_experts"),
        ({"num_experts_per_tok": 17}, InputError, "num_experts_per_tok"),
        ({"moe_intermediate_size": None}, InputError, "moe_intermediate_size"),
        ({"norm_topk_prob": 1}, InputError, "norm_topk_prob"),
    ],
)
def test_invalid_moe_config_is_rejected(change, error, named, checkpoint, tmp_path):
    config = json.loads((checkpoint("qwen3_moe") / "config.json").read_text())
    with pytest.raises(error, match=f"^{named}"):
        read(tmp_path, config | change)


def test_dense_layers_of_moe_models_are_read(checkpoint, tmp_path):
    config = json.loads((checkpoint("qwen3_moe") / "config.json").read_text()) | {"intermediate_size": 384}

    def dense(**change):
        arch = read(tmp_path, config | {"num_hidden_layers": 6} | change)
        assert arch.dense_intermediate == (384 if arch.dense_layers else 0)
        assert [arch.has_experts(i) for i in range(6)] == [i not in arch.dense_layers for i in range(6)]
        return arch.dense_layers

    assert dense() == dense(mlp_only_layers=[], decoder_sparse_step=1) == ()
    assert dense(mlp_only_layers=[5, 0]) == (0, 5)
    assert dense(decoder_sparse_step=2) == (0, 2, 4)
    assert dense(decoder_sparse_step=3, mlp_only_layers=[2]) == (0, 1, 2, 3, 4)
    odd = read(tmp_path, config | {"mlp_only_layers": [0], "intermediate_size": 99})
    with pytest.raises(UnsupportedError, match="^tp: must divide intermediate_size = 99, got 2"):
        odd.check_tp(2)


def test_glm4_moe_architecture_is_read(checkpoint, tmp_path):
    """Covers sigmoid scores, expert groups, shared experts, partial RoPE and multi-token prediction layers."""
    path = checkpoint("glm4_moe", torch.bfloat16, experts=8, top_k=4, groups=4, top_groups=2, options=["use_qk_norm"])
    config, weights = json.loads((path / "config.json").read_text()), Checkpoint(path)
    arch = read_architecture(path)
    assert (arch.score, arch.expert_bias, arch.groups, arch.top_groups, arch.routed_scale) == (
        "sigmoid",
        True,
        4,
        2,
        1.5,
    )
    assert (arch.dense_layers, arch.shared_intermediate, arch.shared_gate) == ((0,), 2 * arch.intermediate, False)
    assert (arch.qk_norm, arch.qkv_bias, arch.rotary_dim, arch.head_dim) == (True, False, 32, 64)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    held = to_megatron(arch, weights, dtype=torch.bfloat16)["decoder.layers.1.mlp.router.expert_bias"]
    assert held.dtype == torch.float32 and torch.equal(held, weights[bias])
    assert read(tmp_path, config | {"use_qk_norm": False, "attention_bias": True}).options == ("attention_bias",)
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
    without = {k: v for k, v in config.items() if k not in ("partial_rotary_factor", "rope_scaling", "rope_theta")}
    assert read(tmp_path, without | newer) == read(tmp_path, {"rope_theta": 10000.0} | without) == arch
    for change, error, named in (
        (
            {"topk_group": 1},
            InputError,
            "num_experts_per_tok: must be at most 2, .* in topk_group = 1 of n_group = 4 groups, got 4",
        ),
        ({"topk_group": 4}, UnsupportedError, "topk_group: num_experts_per_tok // topk_group must be 2, got 4 // 4"),
        ({"topk_group": 5}, InputError, "topk_group: must be at most n_group = 4, got 5"),
        ({"n_group": 3}, InputError, "n_group: must divide 8, the number of experts, got 3"),
        ({"n_group": 0}, InputError, "n_group: must be a positive integer, got 0"),
        (
            {"norm_topk_prob": False},
            UnsupportedError,
            "norm_topk_prob: must be true with sigmoid scores and num_experts_per_tok = 4, got false",
        ),
        ({"routed_scaling_factor": 0}, InputError, "routed_scaling_factor: must be a positive number, got 0"),
        ({"first_k_dense_replace": 2}, InputError, r"first_k_dense_replace: must be an integer in \[0, 2\), got 2"),
        ({"first_k_dense_replace": None}, InputError, "first_k_dense_replace"),
        ({"use_qk_norm": None}, InputError, "use_qk_norm"),
        (
            {"partial_rotary_factor": 0.52},
            InputError,
            r"head_dim, partial_rotary_factor: int\(.*\) must be a positive even number, got int\(64 \* 0.52\) = 33",
        ),
        ({"head_dim": 25}, InputError, "head_dim: must be even, because RoPE rotates pairs of dimensions, got 25"),
        ({"partial_rotary_factor": None}, InputError, "partial_rotary_factor: must be a positive number, got null"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": None}},
            InputError,
            "partial_rotary_factor: must be a positive number, got null",
        ),
        ({"partial_rotary_factor": 1.5}, InputError, r"partial_rotary_factor: must be in \(0, 1\], got 1.5"),
        (
            newer | {"partial_rotary_factor": 0.25},
            InputError,
            r"partial_rotary_factor: must have one value in config.json, got 0.25 and 0.5",
        ),
        ({"rope_scaling": ROPES["yarn"]}, UnsupportedError, "partial_rotary_factor: must be 1 with YaRN, .*, got 0.5"),
        ({"num_nextn_predict_layers": -1}, InputError, "num_nextn_predict_layers"),
        ({"scoring_func": "softmax", "moe_layer_freq": 2}, UnsupportedError, "moe_layer_freq"),
    ):
        with pytest.raises((InputError, UnsupportedError), match=f"^({named})") as raised:
            read(tmp_path, config | change)
        assert isinstance(raised.value, error), change
    # The checkpoint may have the config's number of multi-token prediction layers, which neither engine reads.
    further = {"model.layers.2.eh_proj.weight": torch.ones(2, 2)}
    check_weights(arch, {name: weights[name] for name in weights} | further)
    with pytest.raises(UnsupportedError, match="first 'model.layers.2.eh_proj.weight'"):
        check_weights(replace(arch, mtp_layers=0), {name: weights[name] for name in weights} | further)


def test_shared_expert_is_sharded_as_a_dense_mlp(checkpoint, tmp_path):
    """Its gate is replicated."""
    path = checkpoint("qwen2_moe", experts=6, top_k=3, intermediate=64, shared_intermediate=96)
    arch, weights = read_architecture(path), Checkpoint(path)
    assert (arch.shared_intermediate, arch.normalize_top_k, arch.qkv_bias, arch.qk_norm) == (96, False, True, False)
    part = to_megatron(arch, weights, tp_rank=1, tp_size=2)
    hf, megatron = "model.layers.1.mlp.shared_expert", "decoder.layers.1.mlp.shared_experts."
    gate, up, down = (weights[f"{hf}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    assert torch.equal(part[megatron + "linear_fc1.weight"], torch.cat([gate[48:], up[48:]]))
    assert torch.equal(part[megatron + "linear_fc2.weight"], down[:, 48:])
    assert torch.equal(part[megatron + "gate_weight"], weights[hf + "_gate.weight"])
    assert part[megatron + "gate_weight"].shape == (1, arch.hidden)
    config = json.loads((path / "config.json").read_text())
    assert read(tmp_path, config | {"qkv_bias": True, "mlp_only_layers": None, "decoder_sparse_step": 1}) == arch
    for change, named in (
        ({"qkv_bias": False}, "qkv_bias: must be true, got false"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size: must be a positive integer, got 0"),
    ):
        with pytest.raises((InputError, UnsupportedError), match=f"^{named}"):
            read(tmp_path, config | change)
    odd = read(tmp_path, config | {"shared_expert_intermediate_size": 99})
    with pytest.raises(UnsupportedError, match="^tp: must divide shared_expert_intermediate_size = 99, got 2"):
        odd.check_tp(2)


def test_llama_fields_that_only_vllm_reads_are_rejected(checkpoint, tmp_path):
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    for change in ({"sliding_window": 64}, {"qkv_bias": True}, {"logit_scale": 0.5}):
        with pytest.raises(UnsupportedError, match=f"^{next(iter(change))}: "):
            read(tmp_path, config | change)


@pytest.mark.parametrize(
    "window, message",
    [
        (4096, "must be null, got 4096"),
        ("absent", "must be null in config.json, but the field is missing, .* window with mistral. Add"),
        (0, "must be null, got 0"),
    ],
)
def test_mistral_requires_a_null_sliding_window(window, message, checkpoint, tmp_path):
    config = json.loads((checkpoint("mistral") / "config.json").read_text())
    assert config.pop("sliding_window") is None
    with pytest.raises(UnsupportedError, match=f"^sliding_window: {message}"):
        read(tmp_path, config | ({} if window == "absent" else {"sliding_window": window}))


def test_qwen2_head_dim_that_vllm_ignores_is_rejected(checkpoint, tmp_path):
    config = json.loads((checkpoint("qwen2") / "config.json").read_text())
    with pytest.raises(UnsupportedError, match="^head_dim: "):
        read(tmp_path, config | {"head_dim": 2 * config["head_dim"]})


@pytest.mark.parametrize(
    "change",
    [
        {"something_new": None},
        {"something_new": False},
        {"something_new": "a name"},
        {"logit_scale": 1.0},
        {"num_labels": 2},
        {"layer_types": ["full_attention"] * 2},
    ],
)
def test_fields_without_effect_are_accepted(change, checkpoint, tmp_path):
    config = json.loads((checkpoint() / "config.json").read_text())
    assert read(tmp_path, config | change) == read_architecture(checkpoint())


SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


@pytest.mark.parametrize(
    "field, value",
    [
        *((field, value) for field in SIZES for value in (0, -4, 2.0, "4", True, [4], {}, math.nan, 10**30)),
        *(
            (field, value)
            for field in ("rms_norm_eps", "rope_theta")
            for value in (None, 0, -1e-6, "1e-6", True, [], {}, math.nan, math.inf, 10**400, 1e300)
        ),
        *(("tie_word_embeddings", value) for value in (None, 0, 1, "false", [])),
        *(
            (field, value)
            for field in ("rope_scaling", "rope_parameters")
            for value in (3, "default", [], True, math.nan)
        ),
        ("rope_parameters", {"rope_theta": None}),
        *(
            (name, ROPES[kind] | {field: value})
            for name in ("rope_scaling", "rope_parameters")
            for kind in ROPES
            for field in ("factor", "original_max_position_embeddings")
            for value in (None, 0, -2.0, "4", True, math.nan)
        ),
        ("rope_scaling", ROPES["llama3"] | {"high_freq_factor": None}),
        ("rope_scaling", ROPES["yarn"] | {"original_max_position_embeddings": 64.5}),
        ("rope_scaling", ROPES["yarn"] | {"beta_fast": -1}),
        ("rope_scaling", ROPES["yarn"] | {"truncate": 1}),
        *(("rope_scaling", ROPES["yarn"] | {field: None}) for field in ("beta_fast", "beta_slow", "truncate")),
        ("rope_parameters", {"rope_theta": "1e6"}),
        ("num_key_value_heads", 3),
        ("head_dim", None),
    ],
)
def test_field_of_an_invalid_type_or_value_is_rejected_by_name(field, value, checkpoint, tmp_path):
    config = json.loads((checkpoint() / "config.json").read_text())
    with pytest.raises(InputError, match=f"^{field}: ") as e:
        read(tmp_path, config | {field: value})
    assert len(str(e.value)) < 600


@pytest.mark.parametrize("kind", ROPES)
def test_null_in_the_rotary_parameters_is_named(kind, checkpoint, tmp_path):
    """Only an attention factor of null means the default in both engines."""
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    for field in (*ROPES[kind], "partial_rotary_factor"):
        with pytest.raises((InputError, UnsupportedError), match=f"^rope_scaling: {field}: .*, got null"):
            read(tmp_path, config | {"rope_scaling": ROPES[kind] | {field: None}})
    absent = read(tmp_path, config | {"rope_scaling": ROPES["yarn"]})
    assert read(tmp_path, config | {"rope_scaling": ROPES["yarn"] | {"attention_factor": None}}) == absent


def test_yarn_limits_the_positions(checkpoint, tmp_path):
    config = json.loads((checkpoint().joinpath("config.json")).read_text())
    for factor, positions in ((2.0, 128), (2.3, 148), (1000.0, config["max_position_embeddings"])):
        rope = ROPES["yarn"] | {"factor": factor, "original_max_position_embeddings": 64}
        assert read(tmp_path, config | {"rope_scaling": rope}).positions == positions
    assert read(tmp_path, config).positions == config["max_position_embeddings"]


def test_conflicting_rotary_bases_are_rejected(checkpoint, tmp_path):
    config = json.loads((checkpoint() / "config.json").read_text())
    with pytest.raises(InputError, match="got rope_theta = 10000.0 and rope_parameters: rope_theta = 1000000.0"):
        read(tmp_path, config | {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}})


@pytest.mark.parametrize("kind", ROPES)
def test_rope_scaling_is_read_under_either_name(kind, checkpoint, tmp_path):
    config = json.loads((checkpoint() / "config.json").read_text())
    older = read(tmp_path, config | {"rope_scaling": ROPES[kind]})
    newer = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    assert older.rope_scaling is not None
    assert older == read(tmp_path, newer | {"rope_parameters": ROPES[kind] | {"rope_theta": config["rope_theta"]}})
    assert older == read(tmp_path, config | {"rope_scaling": ROPES[kind], "rope_parameters": ROPES[kind]})
    assert asdict(older) == transformers_reads(tmp_path)
    with pytest.raises(InputError, match="must specify the same scaling, got .* and "):
        read(tmp_path, config | {"rope_scaling": ROPES[kind], "rope_parameters": ROPES[kind] | {"factor": 3.0}})


def test_rotary_base_is_read_from_rope_parameters(checkpoint, tmp_path):
    config = json.loads((checkpoint() / "config.json").read_text())
    del config["rope_theta"]
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_architecture(tmp_path).rope_base == 1e6


@pytest.mark.parametrize("text", [None, "{", "[]", "[" * 10**5, '{"hidden_size": ' + "9" * 5000 + "}"])
def test_broken_config_is_rejected(text, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match="config.json"):
        read_architecture(tmp_path)


def test_broken_weights_are_rejected(checkpoint, tmp_path):
    path = checkpoint("llama")
    shape, tensors = read_architecture(path), load_file(path / "model.safetensors")
    with pytest.raises(InputError, match="model"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(InputError, match="model"):
        Checkpoint(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(InputError, match=name):
        to_megatron(shape, {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(InputError, match=name):
        to_megatron(shape, dict(tensors | {name: torch.zeros(3, 3)}))
    with pytest.raises(UnsupportedError, match="lora_A"):
        to_megatron(shape, dict(tensors | {name + ".lora_A": torch.zeros(3, 3)}))
    with pytest.raises(UnsupportedError, match="num_key_value_heads"):
        to_megatron(shape, tensors, tp_rank=0, tp_size=4)
    with pytest.raises(InputError, match="tp_rank"):
        to_megatron(shape, tensors, tp_rank=2, tp_size=2)


def index(directory, weight_map):
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize(
    "weight_map, message",
    [
        ("{", "cannot read .*model.safetensors.index.json"),
        ("[" * 10**5, "cannot read .*model.safetensors.index.json"),
        ("[]", "index.json: must be a JSON object"),
        ("{}", "index.json: weight_map must be a nonempty JSON object"),
        ('{"weight_map": []}', "index.json: weight_map must be a nonempty JSON object"),
        ({}, "index.json: weight_map must be a nonempty JSON object"),
        ({"a": 3}, r"weight_map\['a'\] must name a file in the same directory, got 3"),
        ({"a": "../model.safetensors"}, "must name a file in the same directory, got '../model"),
        ({"a": "lost.safetensors"}, "has no lost.safetensors, which model.safetensors.index.json lists"),
        ({"a": "config.json"}, "cannot read .*config.json"),
        ({"a": "part.safetensors"}, "part.safetensors has no tensor 'a', which .*index.json lists"),
        ({"b": "part.safetensors", "c": "other.safetensors"}, "two files contain the tensor 'b'"),
    ],
)
def test_broken_index_is_rejected(weight_map, message, tmp_path):
    save_file({"b": torch.zeros(2)}, tmp_path / "part.safetensors")
    save_file({"b": torch.ones(2), "c": torch.ones(2)}, tmp_path / "other.safetensors")
    (tmp_path / "config.json").write_text("{}")
    index(tmp_path, weight_map)
    with pytest.raises(InputError, match="^model: .*" + message):
        Checkpoint(tmp_path)


def test_other_weight_files_that_vllm_would_load_are_rejected(checkpoint, tmp_path):
    tensors = load_file(checkpoint("llama") / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    Checkpoint(tmp_path)
    for name, indexed in (
        ("adapter.safetensors", False),
        ("consolidated.safetensors", False),
        ("consolidated.00.safetensors", True),
    ):
        save_file(tensors, tmp_path / name)
        if indexed:
            index(tmp_path, dict.fromkeys(tensors, "model.safetensors"))
        with pytest.raises(
            UnsupportedError,
            match=f"{name}: must not exist" if indexed else f"{name}: without model.safetensors.index.json",
        ):
            Checkpoint(tmp_path)
        (tmp_path / name).unlink()
    save_file(tensors, tmp_path / "more.safetensors")  # not in the index, so vLLM ignores it too
    Checkpoint(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="^hf_quant_config.json: "):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("file", [True, False])
def test_tied_head_that_differs_from_the_embedding_is_rejected(file, checkpoint, tmp_path):
    """With such a checkpoint, vLLM would untie the model."""
    path = checkpoint("llama", torch.bfloat16, True)
    shape, tensors = read_architecture(path), load_file(path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]

    def given(head):
        both = tensors | {"lm_head.weight": head}
        if not file:
            return both
        save_file(both, tmp_path / "model.safetensors")
        return Checkpoint(tmp_path)

    same = to_megatron(shape, given(embedding.clone()))
    assert same.keys() == to_megatron(shape, tensors).keys()
    other = embedding.clone()
    other.view(torch.int16)[-1, -1] ^= 1  # the smallest possible difference
    for head in (other, embedding.float(), embedding[:-1].clone()):
        with pytest.raises(InputError, match="^tie_word_embeddings: "):
            to_megatron(shape, given(head))
        with pytest.raises(InputError, match="^tie_word_embeddings: "):
            check_weights(shape, given(head))


def test_integer_and_fp8_weights_are_rejected(checkpoint):
    path = checkpoint("llama")
    shape, tensors = read_architecture(path), load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for dtype in (torch.int8, torch.float8_e4m3fn):
        with pytest.raises(UnsupportedError, match=f"{name}: must be fp64, fp32, fp16 or bf16, got "):
            check_weights(shape, tensors | {name: tensors[name].to(dtype)})


def test_huge_layer_count_fails_at_the_first_missing_layer(checkpoint):
    path = checkpoint("llama")
    shape = replace(read_architecture(path), layers=2**31 - 1)
    with pytest.raises(InputError, match="no tensor 'model.layers.2.input_layernorm.weight'"):
        check_weights(shape, Checkpoint(path))
