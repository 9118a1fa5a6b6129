"""HF weights to Megatron's layout and back."""
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from alignkit.convert import Checkpoint, merge_qkv, read_architecture, split_qkv, to_hf, to_megatron
from alignkit.errors import InputError, UnsupportedError


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", ["qwen3", "qwen2", "llama"])
def test_round_trip(arch, tied, tp, checkpoint):
    path = checkpoint(arch, torch.bfloat16, tied)
    shape, weights = read_architecture(path), Checkpoint(path)
    shards = [to_megatron(shape, weights, tp_rank=r, tp_size=tp) for r in range(tp)]
    assert shards[0]["embedding.word_embeddings.weight"].shape[0] == {1: 384, 2: 256}[tp]
    assert ("output_layer.weight" in shards[0]) is not tied
    back = dict(to_hf(shape, shards[0], lambda name: [shard[name] for shard in shards]))
    assert back.keys() == set(weights)
    for name, tensor in back.items():
        assert torch.equal(tensor, weights[name]), name


def test_layout(checkpoint):
    """The rows of each KV group stand together; gate and up of a rank follow each other."""
    shape = read_architecture(checkpoint("qwen3"))
    d, group = shape.head_dim, shape.heads // shape.kv_heads
    q, k, v = (torch.arange(n * d) + start for n, start in ((shape.heads, 0), (shape.kv_heads, 1000),
                                                            (shape.kv_heads, 2000)))
    merged = merge_qkv(shape, q, k, v).view(shape.kv_heads, group + 2, d)
    assert merged[1, 0, 0] == group * d and merged[1, group, 0] == 1000 + d and merged[1, -1, 0] == 2000 + d
    assert all(torch.equal(a, b) for a, b in zip(split_qkv(shape, merged.flatten()), (q, k, v)))
    weights = Checkpoint(checkpoint("qwen3"))
    fc1 = to_megatron(shape, weights, tp_rank=1, tp_size=2)["decoder.layers.0.mlp.linear_fc1.weight"]
    gate, up = (weights[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    assert torch.equal(fc1, torch.cat([gate[256:], up[256:]]))


def test_sharded_files_and_dtype(checkpoint, tmp_path):
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


@pytest.mark.parametrize("change, named", [
    ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
    ({"architectures": ["Qwen3ForCausalLM", "LlamaForCausalLM"]}, "architectures"),
    ({"architectures": None}, "architectures"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "llama3"),
    ({"attention_bias": True}, "attention_bias"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
])
def test_an_unsupported_architecture(change, named, checkpoint, tmp_path):
    config = json.loads((checkpoint() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedError, match=named):
        read_architecture(tmp_path)


def test_newer_configs_keep_the_base_in_rope_parameters(checkpoint, tmp_path):
    config = json.loads((checkpoint() / "config.json").read_text())
    del config["rope_theta"]
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_architecture(tmp_path).rope_base == 1e6


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_broken_config(text, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match="config.json"):
        read_architecture(tmp_path)


def test_broken_weights(checkpoint, tmp_path):
    path = checkpoint("llama")
    shape, tensors = read_architecture(path), load_file(path / "model.safetensors")
    with pytest.raises(InputError, match="model"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(InputError, match="model"):
        Checkpoint(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(InputError, match=name):
        to_megatron(shape, dict({k: v for k, v in tensors.items() if k != name}))
    with pytest.raises(InputError, match=name):
        to_megatron(shape, dict(tensors | {name: torch.zeros(3, 3)}))
    with pytest.raises(UnsupportedError, match="lora_A"):
        to_megatron(shape, dict(tensors | {name + ".lora_A": torch.zeros(3, 3)}))
    with pytest.raises(UnsupportedError, match="num_key_value_heads"):
        to_megatron(shape, tensors, tp_rank=0, tp_size=4)
    with pytest.raises(InputError, match="tp_rank"):
        to_megatron(shape, tensors, tp_rank=2, tp_size=2)
