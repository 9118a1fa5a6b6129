"""Unsupported models, settings and inputs are rejected by name when a real Megatron model is built or called.

The tests match texts of alignkit/megatron/policy.py and of the checks. test_arguments.py tests invalid arguments, and
test_replaced.py methods and hooks that others replace.
"""

import re
import types

import pytest
import torch
import torch.nn.functional as F

from alignkit.convert import read_architecture
from alignkit.errors import InputError, UnsupportedError
from alignkit.megatron import patch_megatron
from tests.megatron import workers
from tests.ropes import ROPES

TOKENS = torch.tensor([[1, 2, 3, 4]])


@pytest.fixture
def patched(world):
    with patch_megatron(300) as handle:
        yield handle


@pytest.fixture
def model(checkpoint, patched):
    return workers.build(checkpoint(), torch.bfloat16)


@pytest.mark.parametrize(
    "field, value, called",
    [
        ("num_moe_experts", 8, "MoE"),
        ("multi_latent_attention", True, "MLA"),
        ("mtp_num_layers", 1, "MTP"),
        ("pipeline_dtype", torch.float32, "must equal params_dtype"),
        ("context_parallel_size", 2, "must be 1, the size of the model's context-parallel group"),
        ("context_parallel_size", 8, "must divide the 4 query heads, got 8"),
        ("cp_comm_type", "a2a+p2p", "no hierarchical context parallelism"),
        ("cp_comm_type", ["p2p", "a2a+p2p"], "no hierarchical context parallelism"),
        ("hierarchical_context_parallel_sizes", [2, 2], "hierarchical context parallelism"),
        ("hybrid_context_parallel", True, "several group sizes"),
        ("fp8", "e4m3", "fp8"),
        ("fp16", True, "fp16"),
        ("window_size", (64, 0), "sliding window"),
        ("defer_embedding_wgrad_compute", True, "weight gradient deferral"),
        ("delay_wgrad_compute", True, "weight gradient deferral"),
        ("softmax_scale", 0.1, "softmax_scale"),
        ("softmax_type", "learnable", "softmax_type"),
        ("apply_query_key_layer_scaling", True, "apply_query_key_layer_scaling"),
        ("activation_func", F.gelu, "SwiGLU"),
        ("gated_linear_unit", False, "SwiGLU"),
        ("normalization", "LayerNorm", "normalization: must be 'RMSNorm', got 'LayerNorm'"),
        ("layernorm_zero_centered_gamma", True, "layernorm_zero_centered_gamma"),
        ("add_bias_linear", True, "add_bias_linear"),
        ("fp32_residual_connection", True, "fp32_residual_connection"),
        ("rotary_interleaved", True, "rotary_interleaved"),
        ("attention_output_gate", True, "attention_output_gate"),
        ("batch_invariant_mode", True, "batch_invariant_mode"),
        ("cpu_offloading", True, "cpu_offloading"),
        ("params_dtype", torch.float16, "params_dtype"),
        ("num_query_groups", 3, "num_query_groups"),
    ],
)
def test_unsupported_config_field_is_rejected(field, value, called, model):
    if field == "num_query_groups":
        model.config.tensor_model_parallel_size = 2
    if field == "pipeline_dtype":
        model.config.pipeline_model_parallel_size = 2
    setattr(model.config, field, value)
    with pytest.raises(UnsupportedError, match=field) as e:
        model(TOKENS, None, None)
    assert called in str(e.value)


def gpt(path, config=None, **arguments):
    """Build a GPTModel that differs from the config in `path`."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from alignkit.megatron.build import transformer_config

    config = transformer_config(read_architecture(path), torch.bfloat16, **(config or {}))
    spec = get_gpt_layer_local_spec(normalization=config.normalization, num_experts=config.num_moe_experts)
    usual = dict(vocab_size=384, max_sequence_length=64, position_embedding_type="rope")
    return GPTModel(config, spec, **(usual | arguments))


@pytest.mark.parametrize(
    "config, arguments, named",
    [
        ({"normalization": "LayerNorm"}, {}, "LayerNorm"),
        ({"gated_linear_unit": False, "activation_func": F.gelu}, {}, "SwiGLU"),
        ({"rotary_interleaved": True}, {}, "rotary_interleaved"),
        # No wavelength is long enough to depend on the factor.
        ({}, {"rope_scaling": True, "rotary_base": 986}, "rotary_pos_emb"),
        ({}, {"rope_scaling": True, "rope_scaling_factor": 0.5}, "rope_scaling"),
        ({}, {"rotary_percent": 0.55}, "kv_channels, rotary_percent: int.* must be a positive even number"),
        ({"kv_channels": 25}, {"rotary_percent": 0.5}, "kv_channels: must be even, .*, got 25"),
        ({}, {"seq_len_interpolation_factor": 2.0}, "seq_len_interpolation_factor"),
        ({}, {"position_embedding_type": "learned_absolute"}, "position_embedding_type"),
        ({}, {"position_embedding_type": "none"}, "position_embedding_type"),
        ({}, {"post_process": False}, "post_process"),
    ],
)
def test_unsupported_model_is_rejected_at_construction(config, arguments, named, checkpoint, patched):
    with pytest.raises(UnsupportedError, match=named):
        gpt(checkpoint("llama"), config, **arguments)


def test_llama3_factor_is_derived_from_the_frequencies(checkpoint, patched):
    """Megatron does not store the factor; common factors are recovered exactly."""
    from alignkit.contract.rope import Llama3
    from alignkit.megatron.supported import check_rotary

    for factor in (1.0, 2.5, 8.0, 16.0, 32.0, 1000 / 64):
        arguments = {"rope_scaling": True, "rope_scaling_factor": factor, "rotary_base": 500000}
        assert check_rotary(gpt(checkpoint("llama"), **arguments)) == (500000.0, Llama3(factor, 1.0, 4.0, 8192))
    assert check_rotary(gpt(checkpoint("llama"))) == (10000.0, None)


def test_inconsistent_yarn_settings_are_rejected(checkpoint, patched):
    """The config, the module and its frequencies must agree."""
    model = workers.build(checkpoint("qwen3", rope_scaling=ROPES["yarn"]), torch.bfloat16)
    model(TOKENS, None, None)
    model.config.yarn_rotary_scaling_factor = 8.0
    with pytest.raises(UnsupportedError, match="yarn_rotary_scaling_factor"):
        model(TOKENS, None, None)
    model.config.yarn_rotary_scaling_factor = 4.0
    model.rotary_pos_emb.inv_freq_inter = model.rotary_pos_emb.inv_freq_inter / 2
    with pytest.raises(UnsupportedError, match="rotary_pos_emb"):
        model(TOKENS, None, None)


def test_yarn_factor_without_yarn_frequencies_is_rejected(model):
    model.config.yarn_rotary_scaling_factor = 4.0
    with pytest.raises(UnsupportedError, match="yarn_rotary_scaling_factor"):
        model(TOKENS, None, None)


@pytest.mark.parametrize("field, value", [("low_freq_factor", 2.0), ("original_max_position_embeddings", 4096)])
def test_llama3_scaling_that_megatron_lacks_is_rejected(field, value, checkpoint, patched):
    path = checkpoint("llama", rope_scaling=ROPES["llama3"] | {field: value})
    with pytest.raises(UnsupportedError, match=r"rope_scaling: .*because Megatron-core hard-codes"):
        workers.build(path, torch.bfloat16)


def test_changed_rotary_frequencies_are_rejected(model):
    """Some frameworks scale the frequencies after the model is built, without a setting."""
    model.rotary_pos_emb.inv_freq = model.rotary_pos_emb.inv_freq / 2
    with pytest.raises(UnsupportedError, match="rotary"):
        model(TOKENS, None, None)


def test_bert_model_is_rejected(checkpoint, patched):
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    from alignkit.megatron.build import transformer_config

    arch = read_architecture(checkpoint("llama"))
    config = transformer_config(arch, torch.float32, normalization="LayerNorm")
    try:
        model = BertModel(config, 0, bert_layer_local_spec, vocab_size=384, max_sequence_length=64)
    except UnsupportedError as e:
        assert "LayerNorm" in str(e)  # construction already rejects its norms
        return
    with pytest.raises(UnsupportedError, match="BertModel"):
        model(TOKENS, None)


def test_other_language_model_is_rejected_by_name_until_undo(patched, checkpoint):
    from megatron.core.models.common.language_module.language_module import LanguageModule

    from alignkit.megatron.build import transformer_config

    class HybridModel(LanguageModule):
        def forward(self):
            return "stock"

    model = HybridModel(transformer_config(read_architecture(checkpoint()), torch.float32))
    with pytest.raises(UnsupportedError, match="HybridModel"):
        model()
    patched.undo()
    assert model() == "stock"


def test_subclass_and_decoder_called_on_its_own_are_rejected(checkpoint, patched):
    from megatron.core.models.gpt.gpt_model import GPTModel

    patched.undo()
    model, other = (workers.build(checkpoint(), torch.bfloat16) for _ in range(2))
    model.__class__ = type("MyGPT", (GPTModel,), {})
    with patch_megatron(300):
        with pytest.raises(UnsupportedError, match="MyGPT"):
            model(TOKENS, None, None)
        with pytest.raises(UnsupportedError, match="TransformerBlock"):
            other.decoder(torch.zeros(2, 1, 256, dtype=torch.bfloat16), None)


def test_lora_adapter_is_rejected(model):
    class LoRALinear(torch.nn.Module):
        def __init__(self, wrapped):
            super().__init__()
            self.wrapped = wrapped

        def forward(self, x):
            return self.wrapped(x)

    model(TOKENS, None, None)
    attention = model.decoder.layers[1].self_attention
    attention.linear_qkv = LoRALinear(attention.linear_qkv)
    with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attention\.linear_qkv: .*LoRALinear"):
        model(TOKENS, None, None)


@pytest.mark.parametrize("where", ["", "output_layer", "decoder.layers.0.mlp.linear_fc1"])
def test_replaced_method_is_rejected(where, model):
    module = model.get_submodule(where)
    name = "_forward_impl" if where else "forward"
    setattr(module, name, types.MethodType(lambda self, *a, **kw: None, module))
    with pytest.raises(UnsupportedError, match=name):
        model._preprocess(TOKENS, None)


def test_dropout_is_rejected_in_training_only(checkpoint, patched):
    model = workers.build(checkpoint(), torch.bfloat16, hidden_dropout=0.1, attention_dropout=0.1)
    model(TOKENS, None, None)
    model.train()
    with pytest.raises(UnsupportedError, match="dropout"):
        model(TOKENS, None, None)


@pytest.mark.parametrize(
    "path",
    [
        "embedding.word_embeddings",
        "decoder.layers.0.self_attention.linear_qkv",
        "decoder.layers.1.self_attention.linear_proj",
        "decoder.layers.0.mlp.linear_fc1",
        "decoder.layers.1.mlp.linear_fc2",
        "output_layer",
    ],
)
def test_a_matrix_of_another_shape_is_rejected(path, model):
    weight = model.get_submodule(path).weight
    whole, (rows, columns) = weight.data, weight.shape
    for part in (whole[: rows - 64], whole[:, : columns - 64]):
        weight.data = part
        message = f"{path}.weight: must have the shape [{rows}, {columns}], with which the module was built, got "
        with pytest.raises(UnsupportedError, match=re.escape(f"{message}{list(part.shape)}")):
            model(TOKENS, None, None)
    weight.data = whole
    model(TOKENS, None, None)


def test_a_router_of_another_shape_is_rejected(checkpoint, patched):
    model = workers.build(checkpoint("glm4_moe", intermediate=64, experts=8, top_k=2, layers=2), torch.bfloat16)
    model(TOKENS, None, None)
    router = model.decoder.layers[1].mlp.router
    for tensor, name, wanted in ((router.weight, "weight", "[8, 256]"), (router.expert_bias, "expert_bias", "[8]")):
        whole, tensor.data = tensor.data, tensor.data[:7]
        message = re.escape(f"decoder.layers.1.mlp.router.{name}.shape: must be {wanted}, as ")
        with pytest.raises(UnsupportedError, match=message):
            model(TOKENS, None, None)
        tensor.data = whole
    model(TOKENS, None, None)


def test_parameter_on_another_device_is_rejected(model):
    model.decoder.final_layernorm.weight = torch.nn.Parameter(torch.zeros(256, device="meta"))
    with pytest.raises(UnsupportedError, match="final_layernorm.weight.*meta"):
        model(TOKENS, None, None)


def test_parameter_subclass_is_rejected(model):
    """Sharded and quantized parameters do not hold the plain values."""

    class Quantized(torch.nn.Parameter):
        pass

    model.decoder.final_layernorm.weight = Quantized(torch.zeros(256))
    with pytest.raises(UnsupportedError, match="final_layernorm.weight: .*Quantized"):
        model(TOKENS, None, None)


def test_inference_context_is_rejected(model):
    with pytest.raises(UnsupportedError, match="inference_context"):
        model(TOKENS, None, None, inference_context=object())


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(1, 1, 4, 4, dtype=torch.bool),
        torch.ones(4, 4).triu(1).bool()[None, None] | torch.tensor([True, False, False, False]),
        torch.ones(4, 4).triu(1).bool()[None, None] | torch.tensor([False, True, False, False]),
        torch.ones(4, 4).triu(2).bool()[None, None],
        torch.ones(4, 4).tril().bool()[None, None],
        torch.ones(1, 4, dtype=torch.bool),
        torch.ones(4, 4).triu(1)[None, None],
        torch.ones(2, 1, 4, 4).triu(1).bool(),
    ],
    ids=[
        "sees the future",
        "padding on the left",
        "a hole",
        "off by one",
        "the other convention",
        "2-D",
        "float",
        "another batch",
    ],
)
def test_mask_that_is_not_causal_is_rejected(mask, model):
    with pytest.raises(UnsupportedError, match="attention_mask"):
        model(TOKENS, None, mask)


def test_causal_masks_are_accepted(model):
    causal = torch.ones(4, 4).triu(1).bool()[None, None]
    padded = causal | torch.tensor([False, False, False, True])
    with torch.no_grad():
        expected = model(TOKENS, None, None)
        assert torch.equal(model(TOKENS, None, causal), expected)
        assert torch.equal(model(TOKENS, None, padded)[:, :3], expected[:, :3])


def packed(ends, **fields):
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = torch.tensor([0, *ends], dtype=torch.int32)
    usual = dict(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=4, max_seqlen_kv=4)
    return PackedSeqParams(**(usual | fields))


def test_inconsistent_packed_seq_params_are_rejected(model):
    for ends, wrong in (
        ([2, 3], "the last value 3"),
        ([3, 2, 4], "2 after 3 at index 2"),
        ([4, 5], "the last value 5"),
    ):
        with pytest.raises(InputError, match=f"cu_seqlens_q(_padded)?: .* end at 4.* got {wrong}"):
            model(TOKENS, None, None, packed_seq_params=packed(ends))
    with pytest.raises(InputError, match=r"max\(max_seqlen_q, max_seqlen_kv\) = 2 tokens, got 3 tokens in sequence 1"):
        model(TOKENS, None, None, packed_seq_params=packed([1, 4], max_seqlen_q=2, max_seqlen_kv=2))
    with pytest.raises(InputError, match="cu_seqlens_kv(_padded)?: must equal .*, got 3 instead of 2 at index 1"):
        model(TOKENS, None, None, packed_seq_params=packed([2, 4], cu_seqlens_kv=torch.tensor([0, 3, 4])))
    with pytest.raises(InputError, match="cu_seqlens_kv(_padded)?: must equal .*, which has 3 values, got 2 values"):
        model(TOKENS, None, None, packed_seq_params=packed([2, 4], cu_seqlens_kv=torch.tensor([0, 4])))
    with pytest.raises(UnsupportedError, match="bshd"):
        model(TOKENS, None, None, packed_seq_params=packed([2, 4], qkv_format="bshd"))
    with pytest.raises(UnsupportedError, match="packed_seq_params"):
        model(TOKENS.expand(2, 4), None, None, packed_seq_params=packed([2, 4]))


@pytest.mark.parametrize("label", [300, 383, -1])
def test_labels_outside_the_unpadded_vocabulary_are_rejected(label, model):
    with pytest.raises(InputError, match=rf"labels: must be in \[0, 300\) .*, got {label} at \[0, 0\]"):
        model(TOKENS, None, None, labels=torch.full_like(TOKENS, label))


def test_nan_in_the_weights_raises(model):
    with torch.no_grad():
        model.decoder.final_layernorm.weight[3] = float("nan")
    with pytest.raises(InputError, match="hidden"):
        model(TOKENS, None, None, labels=TOKENS)


@pytest.mark.parametrize("token", [-1, 300, 383])
def test_tokens_outside_the_unpadded_vocabulary_are_rejected(token, model):
    with pytest.raises(InputError, match=f"input_ids: .*{token}"):
        model(torch.tensor([[1, token]]), None, None)


def test_sequence_length_that_the_ranks_do_not_divide_is_rejected(model):
    model.config.sequence_parallel, model.config.tensor_model_parallel_size = True, 2
    with pytest.raises(
        InputError,
        match="input_ids: the number of tokens .* must be a multiple of tensor_model_parallel_size = 2 .*, got 3",
    ):
        model(torch.tensor([[1, 2, 3]]), None, None)


def test_inference_mode_is_rejected(model):
    mode = pytest.importorskip("megatron.core.inference.utils")
    if not hasattr(mode, "InferenceMode"):
        pytest.skip("this version has no InferenceMode")
    with mode.InferenceMode.active(), pytest.raises(UnsupportedError, match="inference"):
        model(TOKENS, None, None)
