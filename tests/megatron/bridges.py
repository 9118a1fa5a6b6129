"""Functions that test_bridges.py runs on each rank: models built by Megatron-Bridge and by mbridge.

Both packages are real and run on real Megatron-core, with TransformerEngine from `te_on_cpu`.
"""

import torch

from alignkit.convert import read_architecture
from alignkit.megatron import patch_megatron, status
from tests.megatron import hybrids, workers

ON_CPU = {"gradient_accumulation_fusion": False, "use_cpu_initialization": True}
"""Config fields that a model on a CPU needs: gradient accumulation fusion has only a CUDA kernel."""


def stock_modules_and_logprobs(model, rows, multiple):
    """Return the modules that are still stock, from `status`, and the logprobs of `rows`."""
    tokens, positions, labels, counted = workers.batch(rows, multiple)
    with torch.no_grad():
        logp = -model(tokens, positions, None, labels=labels)[counted]
    return status(model)["stock"], logp


def megatron_bridge(tp, model_dir, rows, sequence_parallel):
    """Build and load a model with Megatron-Bridge's provider and export its weights aligned and after undo.

    Returns:
        The results of `stock_modules_and_logprobs`, then HF name -> exported weight, aligned and after undo.
    """
    from megatron.bridge import AutoBridge

    with workers.megatron(tp):
        with patch_megatron(read_architecture(model_dir).vocab):
            bridge = AutoBridge.from_hf_pretrained(str(model_dir), dtype=torch.bfloat16)
            provider = bridge.to_megatron_provider(load_weights=True)
            _finalize_provider(provider, tp, sequence_parallel)
            models = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True, bf16=True)
            assert type(models[0]).__name__ == "Float16Module"
            found = stock_modules_and_logprobs(models[0].eval(), rows, tp.size)
            aligned = dict(bridge.export_hf_weights(models, show_progress=False))
        return *found, aligned, dict(bridge.export_hf_weights(models, show_progress=False))


def hybrid_provider(tp, model_dir, rows, sequence_parallel):
    """Return `stock_modules_and_logprobs` of a model from HybridModelProvider, with the weights that `build` loads."""
    from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider

    arch = read_architecture(model_dir)
    with workers.megatron(tp), patch_megatron(arch.vocab):
        provider = HybridModelProvider(
            hybrid_layer_pattern="*-*-",
            hidden_size=arch.hidden,
            ffn_hidden_size=arch.intermediate,
            num_attention_heads=arch.heads,
            num_query_groups=arch.kv_heads,
            kv_channels=arch.head_dim,
            layernorm_epsilon=arch.norm_eps,
            normalization="RMSNorm",
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=torch.bfloat16,
            bf16=True,
            position_embedding_type="rope",
            rotary_base=arch.rope_base,
            share_embeddings_and_output_weights=arch.tied,
            vocab_size=arch.padded_vocab(tp.size),
            seq_length=64,
        )
        _finalize_provider(provider, tp, sequence_parallel)
        model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True, bf16=True)[
            0
        ].eval()
        reference_model = workers.build(
            model_dir, torch.bfloat16, sequence_parallel, transformer_engine=True, hybrid_layer_pattern="*-*-"
        )
        model.module.load_state_dict(reference_model.state_dict())
        assert type(model.module) is hybrids.hybrid_model.HybridModel
        return stock_modules_and_logprobs(model, rows, tp.size)


def _finalize_provider(provider, tp, sequence_parallel):
    from megatron.core.transformer.enums import AttnBackend

    # Megatron rejects a second attention backend in a process, and other tests use auto.
    provider.attention_backend = AttnBackend.auto
    for name, value in ON_CPU.items():
        setattr(provider, name, value)
    provider.apply_rope_fusion = False  # it would query TransformerEngine's version
    provider.tensor_model_parallel_size, provider.sequence_parallel = tp.size, sequence_parallel
    provider.finalize()


def mbridge(tp, model_dir, rows, sequence_parallel):
    """Do the same as `megatron_bridge` with mbridge."""
    from mbridge import AutoBridge

    with workers.megatron(tp):
        with patch_megatron(read_architecture(model_dir).vocab):
            bridge = AutoBridge.from_pretrained(str(model_dir))
            # mbridge expects transformers 4 configs, in which rope_theta is a field of its own.
            bridge.hf_config.rope_theta = bridge.hf_config.rope_parameters["rope_theta"]
            bridge.set_extra_args(sequence_parallel=sequence_parallel, **ON_CPU)
            models = bridge.get_model(weight_path=str(model_dir), use_cpu_initialization=True)
            found = stock_modules_and_logprobs(models[0].eval(), rows, tp.size)
            aligned = dict(bridge.export_weights(models))
        return *found, aligned, dict(bridge.export_weights(models))
