"""Functions that test_hybrid.py runs on each rank, with real Megatron-core's HybridModel."""

import torch

from alignkit.convert import read_architecture
from alignkit.megatron import patch_megatron, status
from alignkit.megatron.build import hf_weights, hybrid_model, transformer_config
from tests.megatron import te_workers, workers

TOKENS = [[1, 2, 3, 4], [5, 6, 7, 8]]


def tensor(values):
    return torch.tensor(values, device=workers.DEVICE)


def build_without_checkpoint(spec, pattern="*-*-", cls=None, **arguments):
    """Build a HybridModel without a checkpoint.

    Args:
        spec: Layer spec.
        pattern: Hybrid layer pattern.
        cls: Model class; None: HybridModel.
        **arguments: Arguments of the model; `fields` overrides fields of its TransformerConfig.
    """
    config = dict(num_layers=len(pattern), hidden_size=256, num_attention_heads=4, num_query_groups=2, kv_channels=64)
    fields = config | arguments.pop("fields", {})
    return (cls or hybrid_model.HybridModel)(
        _config(**fields),
        spec,
        vocab_size=384,
        max_sequence_length=64,
        hybrid_layer_pattern=pattern,
        **({"position_embedding_type": "rope"} | arguments),
    )


def _config(**fields):
    from megatron.core.transformer.transformer_config import TransformerConfig

    dense = dict(
        ffn_hidden_size=512,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    return TransformerConfig(**(dense | fields))


def wrong_on_one_rank(tp, model_dir, what):
    """Run `workers.wrong_on_one_rank` on a HybridModel."""
    return workers.wrong_on_one_rank(tp, model_dir, what, WRONG, hybrid_layer_pattern="*-*-")


WRONG = {
    "input_ids": lambda model, call: call.update(tokens=call["tokens"] + 300),
    "labels": lambda model, call: call.update(labels=call["labels"] + 1000),
    "labels None": lambda model, call: call.update(labels=None),
    "temperature": lambda model, call: call.update(temperature=0.7),
    "packed_seq_params": lambda model, call: call.update(packed_seq_params="x"),
    "hybrid_layer_pattern": lambda model, call: workers._attribute(model, "hybrid_layer_pattern", "*-|*-"),
    "hybrid_layer_pattern: must contain only * (attention) and - (dense MLP), got M": lambda model, call: (
        workers._attribute(model, "hybrid_layer_pattern", "*-M-")
    ),
    "decoder.final_norm": lambda model, call: workers._hook(model.decoder.final_norm),
    "HybridModel.forward": lambda model, call: workers._attribute(
        hybrid_model.HybridModel, "forward", lambda *args, **kwargs: None
    ),
    "decoder.layers.1.forward": lambda model, call: workers._attribute(model.decoder.layers[1], "forward", print),
    "decoder.layers.1.mlp_bda": lambda model, call: workers._attribute(
        model.decoder.layers[1], "mlp_bda", lambda training, fused: None
    ),
}
"""Error text, up to an optional " None" -> change that rank 1 alone makes."""


def compare_hybrid_stack_spec(tp, model_dir, rows):
    """Compare a model of Megatron's `hybrid_stack_spec` with `build`'s model of GPTModel's layer spec.

    Returns:
        Losses of the `hybrid_stack_spec` model before the patch and aligned, losses of `build`'s model aligned, losses
        of the former after undo, and its `status` while aligned.
    """
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    arch = read_architecture(model_dir)
    with workers.megatron(tp):
        reference_model = te_workers.build(model_dir, hybrid_layer_pattern="*-*-")
        config = transformer_config(arch, torch.bfloat16, tp=tp.size)
        model = build_with_spec(config, hybrid_stack_spec, arch).to(torch.bfloat16).eval()
        model.load_state_dict(reference_model.state_dict())
        before = te_workers.losses(model, rows)
        with patch_megatron(arch.vocab):
            aligned, expected, report = (
                te_workers.losses(model, rows),
                te_workers.losses(reference_model, rows),
                status(model),
            )
        return before, aligned, expected, te_workers.losses(model, rows), report


def build_with_spec(config, spec, arch):
    return hybrid_model.HybridModel(
        config,
        spec,
        vocab_size=arch.padded_vocab(config.tensor_model_parallel_size),
        max_sequence_length=64,
        hybrid_layer_pattern="*-*-",
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_base=arch.rope_base,
    )


def exported_weights(tp, model_dir):
    """Return the weights by HF name."""
    with workers.megatron(tp), patch_megatron(300):
        model = workers.build(model_dir, torch.bfloat16, hybrid_layer_pattern="*-*-")
        return dict(hf_weights(model, read_architecture(model_dir)))
