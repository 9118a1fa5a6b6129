"""Rejection of unsupported options and models, by name, when real vLLM creates its engine configuration.

No engine starts. The tests match texts of alignkit/vllm/refuse.py and policy.py; tests/megatron/configs.json holds the
published models that must be accepted.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from alignkit.errors import UnsupportedError
from alignkit.runtime.families import SM90
from alignkit.vllm.refuse import refuse_model
from tests.ropes import ROPES
from tests.vllm.conftest import ENGINE

PUBLISHED = json.loads((Path(__file__).parent.parent / "megatron/configs.json").read_text())


@pytest.fixture(scope="module")
def process(vllm_process):
    process = vllm_process()
    process(patch)
    return process


def patch(state):
    from alignkit.vllm import patch_vllm

    patch_vllm()


def configure(state, model, options):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model, **ENGINE | options).create_engine_config() and None


def check_config_for(state, model, env, device, executor):
    """Check a configuration that this machine cannot create: the V2 runner (needs Triton), a GPU, or Ray."""
    before = dict(os.environ)
    from vllm.engine.arg_utils import EngineArgs

    from alignkit.vllm.refuse import refuse_config

    config = EngineArgs(model, **ENGINE).create_engine_config()
    config.device_config.device_type = device
    config.parallel_config.distributed_executor_backend = executor
    os.environ |= env
    try:
        refuse_config(config)
    finally:
        os.environ.clear()
        os.environ |= before


def build_with_an_extra_layer(state, model):
    from vllm import LLM, ModelRegistry
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    class Extended(Qwen3ForCausalLM):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.extra = torch.nn.GELU()

    ModelRegistry.register_model("Qwen3ForCausalLM", Extended)
    LLM(model, **ENGINE)


@pytest.mark.parametrize(
    "name, options",
    [
        ("LoRA", {"enable_lora": True}),
        (
            "speculative decoding",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        ),
        ("quantization", {"quantization": "fp8"}),
        (
            "alignkit_vocab_size: must be an int .* at most the model's vocabulary size 2000, got 2001",
            {"additional_config": {"alignkit_vocab_size": 2001}},
        ),
        ("alignkit_vocab_size: .*, got '7'", {"additional_config": {"alignkit_vocab_size": "7"}}),
        ("pipeline_parallel_size: must be 1, got 2", {"pipeline_parallel_size": 2}),
        (
            "decode_context_parallel_size: must be 1, got 2",
            {"tensor_parallel_size": 8, "decode_context_parallel_size": 2},
        ),
        ("--api-server-count: must be 1, .*, got 2", {"_api_process_count": 2}),
        ("weight offloading", {"cpu_offload_gb": 1}),
        ("enforce_eager: must be True .* torch.compile", {"enforce_eager": False}),
        ("logprobs_mode: must be raw_logprobs or processed_logprobs, got raw_logits", {"logprobs_mode": "raw_logits"}),
        ("logprobs_mode: .*, got processed_logits", {"logprobs_mode": "processed_logits"}),
        ("kv_cache_dtype: must be auto or the model's dtype .*, got fp8", {"kv_cache_dtype": "fp8"}),
        ("dtype: must be bfloat16 or float32, got torch.float16", {"dtype": "float16"}),
        ("worker_cls", {"worker_cls": "mine.Worker"}),
        ("model_impl: must be auto or vllm, got transformers", {"model_impl": "transformers"}),
        ("prompt embeddings", {"enable_prompt_embeds": True}),
        ("custom logits processors", {"logprobs_mode": "processed_logprobs", "logits_processors": ["mine:Processor"]}),
        ("KV cache transfer", {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_unsupported_engine_options_are_rejected(process, checkpoint, name, options):
    with pytest.raises(UnsupportedError, match=name):
        process(configure, checkpoint(), options)


@pytest.mark.parametrize(
    "name, env, device",
    [
        ("VLLM_USE_V2_MODEL_RUNNER .V2 model runner.: must be 0", {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "cpu"),
        ("device: must be cpu with this version of vLLM, got cuda", {}, "cuda"),
        ("VLLM_BATCH_INVARIANT: must be 0 or unset", {"VLLM_BATCH_INVARIANT": "1"}, "cpu"),
        ("VLLM_USE_BREAKABLE_CUDAGRAPH", {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}, "cpu"),
    ],
)
def test_unsupported_runners_devices_and_variables_are_rejected(process, checkpoint, name, env, device):
    with pytest.raises(UnsupportedError, match=name):
        process(check_config_for, checkpoint(), env, device, "uni")


def test_ray_v1_and_custom_executors_are_rejected(process, checkpoint):
    """Ray's V1 executor bypasses the worker's execute_model, which checks the model."""
    process(check_config_for, checkpoint(), {}, "cpu", "ray")
    with pytest.raises(
        UnsupportedError, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND: must be 1, because Ray's V1 executor"
    ):
        process(check_config_for, checkpoint(), {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0"}, "cpu", "ray")
    own = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    with pytest.raises(UnsupportedError, match=f"distributed_executor_backend: must be one of uni, .*, got {own}"):
        process(configure, checkpoint(), {"distributed_executor_backend": own})


def compilation_reasons(state, chosen):
    """Return the reasons against a compilation config under a vLLM version with CUDA graphs, which needs a GPU."""
    import types

    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

    from alignkit.vllm.policy import COMPILATION, Asked
    from alignkit.vllm.refuse import part_reasons

    config = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, backend="inductor", cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )
    for name, value in chosen.items():
        owner, _, field = name.rpartition("__")
        setattr(
            getattr(config, owner) if owner else config, field, CompilationMode(value) if field == "mode" else value
        )
    asked = Asked(facts_on(SM90), types.SimpleNamespace(compilation_config=config))
    return part_reasons(asked, "compilation_config", COMPILATION)


def facts_on(family):
    """Return the facts of the installed vLLM on devices of `family`."""
    from alignkit.engines.versions import Names
    from alignkit.vllm.versions import VERSIONS, derive
    from tests.vllm.test_hook_points import installed

    return derive(Names(installed(), VERSIONS.declared), family)


def model_reasons(state, architecture):
    """Return the reasons against a model architecture whose rotary embedding is partial."""
    import types

    from alignkit.vllm.refuse import _model_reasons

    hf = types.SimpleNamespace(architectures=[architecture], rope_parameters={"partial_rotary_factor": 0.5})
    return _model_reasons(hf, None)


def test_partial_rotation_is_rejected_outside_of_glm(process):
    assert process(model_reasons, "Glm4MoeForCausalLM") == []
    assert process(model_reasons, "Qwen3MoeForCausalLM") == [
        "partial_rotary_factor: must be 1 for Qwen3MoeForCausalLM, got 0.5"
    ]


def check_unknown_field(state, model, part, field, value):
    """Check a configuration with a field that alignkit does not know."""
    import dataclasses

    from vllm.engine.arg_utils import EngineArgs

    from alignkit.vllm import refuse

    config = EngineArgs(model, **ENGINE).create_engine_config()
    owner = getattr(config, part) if part else config
    stock = type(owner)
    owner.__class__ = dataclasses.make_dataclass("Newer", [(field, object, None)], bases=(stock,), kw_only=True)
    try:
        setattr(owner, field, None)
        refuse.refuse_config(config)  # a default value is accepted
        setattr(owner, field, value)
        refuse.refuse_config(config)
    finally:
        owner.__class__ = stock


@pytest.mark.parametrize(
    "part", ["", "model_config", "parallel_config", "cache_config", "scheduler_config", "attention_config"]
)
def test_an_unknown_field_must_keep_its_default(process, checkpoint, part):
    with pytest.raises(UnsupportedError, match="newer_kernels: must be None, got True"):
        process(check_unknown_field, checkpoint(), part, "newer_kernels", True)


@pytest.mark.parametrize(
    "options",
    [
        dict(
            enable_prefix_caching=False, block_size=32, prefix_caching_hash_algo="sha256", enable_chunked_prefill=True
        ),
        dict(max_num_batched_tokens=64, max_num_seqs=2, scheduling_policy="priority", async_scheduling=True),
        dict(logprobs_mode="processed_logprobs", max_logprobs=50, generation_config="vllm", seed=7),
        dict(served_model_name="mine", trust_remote_code=True, skip_tokenizer_init=True, revision="main"),
        dict(tensor_parallel_size=2, distributed_executor_backend="mp", disable_custom_all_reduce=True),
        dict(
            optimization_level=0, disable_log_stats=True, load_format="dummy", override_generation_config={"top_k": 5}
        ),
        dict(kv_cache_memory_bytes=2**27, max_model_len=128, worker_extension_cls="mine.Extension"),
    ],
    ids=lambda options: next(iter(options)),
)
def test_supported_options_are_accepted(process, checkpoint, options):
    process(configure, checkpoint(), options)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_configurations_are_accepted(process, tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    process(configure, str(tmp_path), {"dtype": "bfloat16"})


def test_a_field_outside_the_tables_must_keep_its_default(process, checkpoint):
    with pytest.raises(UnsupportedError, match="use_non_causal: must be False, got True"):
        process(configure, checkpoint(), {"attention_config": {"use_non_causal": True}})


@pytest.mark.parametrize(
    "name, chosen",
    [
        ("compilation mode.: must be NONE or VLLM_COMPILE, got STOCK", {"mode": 1}),
        ("compilation backend.: must be inductor or eager, got mine", {"backend": "mine"}),
        ("graph partitioning by inductor", {"use_inductor_graph_partition": True}),
        ("custom compiler passes", {"inductor_passes": {"post": "mine.pass"}}),
        ("cache_dir: must not be set", {"cache_dir": "mine"}),
        ("compiler fusion passes.: must be off, got fuse_allreduce_rms", {"pass_config__fuse_allreduce_rms": True}),
    ],
)
def test_unsupported_compilation_options_are_named(process, name, chosen):
    assert process(compilation_reasons, {}) == []
    (reason,) = process(compilation_reasons, chosen)
    assert re.search(name, reason)


@pytest.mark.parametrize(
    "arch, name, change",
    [
        (
            "llama",
            "architectures: must be one of .*, got GraniteForCausalLM",
            {"architectures": ["GraniteForCausalLM"], "model_type": "granite"},
        ),
        (
            "qwen3",
            "Dots1ForCausalLM .MoE",
            {"architectures": ["Dots1ForCausalLM"], "model_type": "dots1", "n_routed_experts": 8},
        ),
        (
            "qwen3",
            "RoPE scaling.: rope_type must be one of .*, got 'dynamic'",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        ),
        ("llama", "attention_factor", {"rope_scaling": ROPES["yarn"] | {"attention_factor": 1.0}}),
        (
            "llama",
            "rope_scaling: beta_fast: must be a positive number, got null",
            {"rope_scaling": ROPES["yarn"] | {"beta_fast": None}},
        ),
        ("glm4_moe", "head_dim: must be even, .*, got 25", {"head_dim": 25}),
        (
            "qwen2",
            "sliding_window: must be null, got 32",
            {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0},
        ),
        ("mistral", "sliding_window: must be null, got 4096", {"sliding_window": 4096}),
        ("qwen3", "is_causal: must be true", {"is_causal": False}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_unsupported_models_are_rejected(process, checkpoint, tmp_path, arch, name, change):
    model = shutil.copytree(checkpoint(arch), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedError, match=name):
        process(configure, str(model), {})


@pytest.mark.parametrize(
    "change, rows, why",
    [
        (
            {"rope_scaling": ROPES["yarn"] | {"factor": 2.0, "original_max_position_embeddings": 64}},
            128,
            r"original_max_position_embeddings \* factor of YaRN",
        ),
        ({"model_max_length": 8192}, 4096, "max_position_embeddings"),
        ({"model_max_length": 8192, "rope_scaling": ROPES["llama3"]}, 4096, "max_position_embeddings"),
    ],
    ids=["yarn", "unscaled", "llama3"],
)
def test_a_length_beyond_the_rotary_table_is_rejected(process, checkpoint, tmp_path, change, rows, why):
    """VLLM accepts such a length for YaRN, and if config.json has a longer `model_max_length`."""
    model = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    process(configure, str(model), {"max_model_len": rows})
    message = f"max_model_len: must be at most {rows}, the model's {why}, got {rows + 1}"
    with pytest.raises(UnsupportedError, match=message):
        process(configure, str(model), {"max_model_len": rows + 1})


def test_a_model_with_an_extra_layer_is_rejected(process, checkpoint):
    """The configuration is supported, but vLLM builds an extra module from it."""
    with pytest.raises(UnsupportedError, match=r"supported classes, got the model \(Extended\), extra \(GELU\)"):
        process(build_with_an_extra_layer, checkpoint())


def test_an_unknown_module_is_named():
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    with pytest.raises(UnsupportedError, match=r"0 \(Linear\)"):
        refuse_model(model, ())


def attention(state, options):
    from alignkit.vllm.attention import AlignedAttentionImpl

    impl = object.__new__(AlignedAttentionImpl)
    impl.__init__(8, 64, 0.125, 4, **options)


@pytest.mark.parametrize(
    "name, options",
    [
        ("ALiBi", {"alibi_slopes": [0.5] * 8}),
        ("sliding_window: must be None, got 32", {"sliding_window": 32}),
        ("attention soft cap.: must be None or 0, got 30.0", {"logits_soft_cap": 30.0}),
        ("attn_type: must be decoder, got encoder_only", {"attn_type": "encoder_only"}),
        ("KV cache shared", {"kv_sharing_target_layer_name": "model.layers.0"}),
        ("kv_cache_dtype: must be auto, bfloat16 or float32, got fp8", {"kv_cache_dtype": "fp8"}),
        ("sinks: must be None, got a list", {"sinks": [0.0]}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_unsupported_attention_variants_are_rejected(process, name, options):
    with pytest.raises(UnsupportedError, match=name):
        process(attention, options)
