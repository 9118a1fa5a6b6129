"""What the tests of Megatron-Bridge and mbridge run on each rank, where TransformerEngine is that of `te_on_cpu`."""

import torch

from alignkit.convert import read_architecture
from alignkit.megatron import patch_megatron, status
from tests.megatron import hybrids, workers

ON_CPU = {"gradient_accumulation_fusion": False, "use_cpu_initialization": True}
"""What a model without a GPU needs, whoever builds it: the kernel of that fusion is of CUDA."""


def taken_over(model, rows, multiple):
    """Which of its modules are stock, and its logprobs."""
    tokens, positions, labels, counted = workers.batch(rows, multiple)
    with torch.no_grad():
        logp = -model(tokens, positions, None, labels=labels)[counted]
    return status(model)["stock"], logp


def megatron_bridge(tp, model_dir, rows, sequence_parallel):
    """Of a model that its provider builds from an HF directory and loads: `taken_over`, and the weights that it gives back
    under their HF names while it is aligned, and after that."""
    from megatron.bridge import AutoBridge

    with workers.megatron(tp):
        with patch_megatron(read_architecture(model_dir).vocab):
            bridge = AutoBridge.from_hf_pretrained(str(model_dir), dtype=torch.bfloat16)
            provider = bridge.to_megatron_provider(load_weights=True)
            _settle(provider, tp, sequence_parallel)
            models = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True, bf16=True)
            assert type(models[0]).__name__ == "Float16Module"
            found = taken_over(models[0].eval(), rows, tp.size)
            aligned = dict(bridge.export_hf_weights(models, show_progress=False))
        return *found, aligned, dict(bridge.export_hf_weights(models, show_progress=False))


def hybrid_provider(tp, model_dir, rows, sequence_parallel):
    """`taken_over` of a model of its HybridModelProvider, with weights that `build` loads."""
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
        _settle(provider, tp, sequence_parallel)
        model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True, bf16=True)[
            0
        ].eval()
        halves = workers.build(
            model_dir, torch.bfloat16, sequence_parallel, transformer_engine=True, hybrid_layer_pattern="*-*-"
        )
        model.module.load_state_dict(halves.state_dict())
        assert type(model.module) is hybrids.hybrid_model.HybridModel
        return taken_over(model, rows, tp.size)


def _settle(provider, tp, sequence_parallel):
    from megatron.core.transformer.enums import AttnBackend

    # As every other model's of the process: Megatron refuses a second one.
    provider.attention_backend = AttnBackend.auto
    for name, value in ON_CPU.items():
        setattr(provider, name, value)
    provider.apply_rope_fusion = False  # for which the version of TransformerEngine is asked
    provider.tensor_model_parallel_size, provider.sequence_parallel = tp.size, sequence_parallel
    provider.finalize()


def mbridge(tp, model_dir, rows, sequence_parallel):
    """The same of mbridge's model."""
    from mbridge import AutoBridge

    with workers.megatron(tp):
        with patch_megatron(read_architecture(model_dir).vocab):
            bridge = AutoBridge.from_pretrained(str(model_dir))
            # It was written for transformers 4, whose configurations have the base by itself.
            bridge.hf_config.rope_theta = bridge.hf_config.rope_parameters["rope_theta"]
            bridge.set_extra_args(sequence_parallel=sequence_parallel, **ON_CPU)
            models = bridge.get_model(weight_path=str(model_dir), use_cpu_initialization=True)
            found = taken_over(models[0].eval(), rows, tp.size)
            aligned = dict(bridge.export_weights(models))
        return *found, aligned, dict(bridge.export_weights(models))
