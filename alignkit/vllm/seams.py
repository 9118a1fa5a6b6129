"""Where alignkit meets vLLM: the one file that knows vLLM's versions.

`SEAMS` names, for each version read, what the adapter subclasses, replaces or calls. They are resolved in the
syntax tree of a vLLM root directory, installed or an unpacked wheel, so a version can be checked without
running it. Running is another claim: only `RUNS`, only on the CPU.
"""
from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from alignkit.errors import UnsupportedError

RUNS = "0.32"
"""The minor version that the adapter runs on."""


@dataclass(frozen=True)
class Seam:
    """A name in vLLM that must exist.

    file: path below the `vllm` package. name: dotted name in that file. accepts: parameters that the
    function, or the class's `__init__`, must take.
    """

    file: str
    name: str
    accepts: tuple[str, ...] = ()


_LAYERS = "model_executor/layers/"
_SAMPLE_V2 = "v1/worker/gpu/sample/"

_COMMON = (
    # Getting in: the engine's configuration names the worker, the front end admits requests.
    Seam("engine/arg_utils.py", "EngineArgs.create_engine_config"),
    Seam("config/parallel.py", "ParallelConfig.worker_cls"),
    Seam("v1/engine/llm_engine.py", "InputProcessor"),
    Seam("v1/engine/async_llm.py", "InputProcessor"),
    Seam("v1/engine/input_processor.py", "InputProcessor.__init__", ("vllm_config", "renderer")),
    Seam("v1/engine/input_processor.py", "InputProcessor._validate_params", ("params", "supported_tasks")),
    Seam("v1/worker/cpu_worker.py", "CPUWorker.init_device"),
    Seam("v1/worker/gpu_worker.py", "Worker.load_model"),
    Seam("plugins/__init__.py", "load_general_plugins"),
    # Layers, replaced by class when the model is built.
    Seam("model_executor/custom_op.py", "op_registry_oot"),
    Seam("model_executor/custom_op.py", "PluggableLayer.__new__"),
    Seam("model_executor/custom_op.py", "CustomOp.__new__"),
    Seam(_LAYERS + "linear.py", "UnquantizedLinearMethod.process_weights_after_loading", ("layer",)),
    Seam(_LAYERS + "linear.py", "UnquantizedLinearMethod.apply", ("layer", "x", "bias")),
    Seam(_LAYERS + "linear.py", "ReplicatedLinear"),
    Seam(_LAYERS + "linear.py", "ColumnParallelLinear"),
    Seam(_LAYERS + "linear.py", "MergedColumnParallelLinear"),
    Seam(_LAYERS + "linear.py", "QKVParallelLinear"),
    Seam(_LAYERS + "linear.py", "RowParallelLinear", ("input_is_parallel", "reduce_results", "disable_tp")),
    Seam(_LAYERS + "linear.py", "RowParallelLinear.forward", ("input_",)),
    Seam(_LAYERS + "vocab_parallel_embedding.py", "UnquantizedEmbeddingMethod.tie_weights"),
    Seam(_LAYERS + "vocab_parallel_embedding.py", "VocabParallelEmbedding"),
    Seam(_LAYERS + "vocab_parallel_embedding.py", "ParallelLMHead.tie_weights"),
    Seam(_LAYERS + "layernorm.py", "RMSNorm", ("eps", "var_hidden_size", "has_weight")),
    Seam(_LAYERS + "activation.py", "SiluAndMul"),
    Seam(_LAYERS + "rotary_embedding/__init__.py", "_ROPE_DICT"),
    Seam(_LAYERS + "rotary_embedding/base.py", "RotaryEmbedding",
         ("head_size", "rotary_dim", "max_position_embeddings", "base", "is_neox_style", "init_cache")),
    Seam(_LAYERS + "logits_processor.py", "LogitsProcessor", ("scale", "logits_as_input", "soft_cap")),
    Seam(_LAYERS + "logits_processor.py", "LogitsProcessor._gather_logits", ("logits",)),
    Seam(_LAYERS + "logits_processor.py", "LogitsProcessor.get_top_tokens"),
    Seam(_LAYERS + "attention/attention.py", "Attention"),
    # Attention, by the registry of backends.
    Seam("v1/attention/backends/registry.py", "AttentionBackendEnum.CPU_ATTN"),
    Seam("v1/attention/backends/registry.py", "register_backend", ("backend", "class_path")),
    Seam("v1/attention/selector.py", "_cached_get_attn_backend"),
    Seam("v1/attention/backend.py", "AttentionBackend.get_builder_cls"),
    Seam("v1/attention/backend.py", "AttentionImpl.forward", ("kv_cache", "attn_metadata", "output")),
    Seam("v1/attention/backends/cpu_attn.py", "CPUAttentionBackendImpl.do_kv_cache_update",
         ("key", "value", "kv_cache", "slot_mapping")),
    # Logprobs, V1 runner.
    Seam("v1/sample/sampler.py", "Sampler.compute_logprobs", ("logits",)),
    Seam("v1/sample/ops/topk_topp_sampler.py", "TopKTopPSampler.forward_cpu",
         ("logits", "generators", "k", "p")),
    # Logprobs, V2 runner: one function for sampled, prompt and chosen tokens.
    Seam(_SAMPLE_V2 + "logprob.py", "compute_token_logprobs", ("logits", "token_ids")),
    Seam(_SAMPLE_V2 + "sampler.py", "Sampler.sample"),
    # The model classes whose parts are all named above.
    Seam("model_executor/models/llama.py", "LlamaForCausalLM"),
    Seam("model_executor/models/qwen2.py", "Qwen2ForCausalLM"),
    Seam("model_executor/models/qwen3.py", "Qwen3ForCausalLM"),
)

# From 0.32: prompt logprobs import the V2 function by name, the vocabulary can stay sharded up to the
# sampler, a cache layout is a named enum where 0.26 asks the backend for a shape, and errors have classes.
_SINCE_0_32 = (
    Seam("exceptions.py", "VLLMClientError"),
    Seam(_SAMPLE_V2 + "prompt_logprob.py", "compute_token_logprobs"),
    Seam(_LAYERS + "logits_processor.py", "LogitsProcessor.forward", ("skip_gather",)),
    Seam(_LAYERS + "logits_processor.py", "LogitsProcessor.get_top_k_tokens"),
    Seam("v1/kv_cache_layout.py", "KVCacheLayout.LBNHC"),
    Seam("v1/attention/backend.py", "AttentionBackend.supported_kv_cache_layouts"),
)

SEAMS: dict[str, tuple[Seam, ...]] = {
    "0.26": _COMMON + (Seam("v1/attention/backend.py", "AttentionBackend.get_kv_cache_shape"),),
    "0.32": _COMMON + _SINCE_0_32,
    "0.33": _COMMON + _SINCE_0_32,
}

STRUCTURE = frozenset({
    "ModuleList", "Attention", "ApplyRotaryEmb",
    "LlamaForCausalLM", "LlamaModel", "LlamaDecoderLayer", "LlamaAttention", "LlamaMLP",
    "Qwen2ForCausalLM", "Qwen2Model", "Qwen2DecoderLayer", "Qwen2Attention", "Qwen2MLP",
    "Qwen3ForCausalLM", "Qwen3Model", "Qwen3DecoderLayer", "Qwen3Attention",
})
"""Classes of a built model that only arrange others. Any other class must be one of alignkit's."""


def unresolved(root: Path, version: str) -> list[str]:
    """The seams of a minor `version` that the vLLM package directory `root` lacks, each with the reason."""
    trees: dict[Path, ast.Module] = {}
    problems = []
    for seam in SEAMS[version]:
        path = root / seam.file
        if path.is_file() and path not in trees:
            trees[path] = ast.parse(path.read_text(encoding="utf-8"))
        problem = _problem(trees[path], seam) if path in trees else "no such file"
        if problem:
            problems.append(f"{seam.file}: {seam.name}: {problem}")
    return problems


def require_version(version: str) -> None:
    """Raises UnsupportedError unless the adapter runs on the vLLM of this full `version`."""
    minor = ".".join(version.split(".")[:2])
    if minor == RUNS:
        return
    if minor in SEAMS:
        raise UnsupportedError(
            f"vLLM {version}: its seams are known, but alignkit runs on {RUNS}.x only (no CUDA backend yet)")
    raise UnsupportedError(f"vLLM {version}: unknown version; alignkit runs on {RUNS}.x")


def require_seams(root: Path) -> None:
    """Raises UnsupportedError naming what the vLLM package directory `root` lacks of `RUNS`."""
    lacking = unresolved(root, RUNS)
    if lacking:
        raise UnsupportedError(f"this build of vLLM {RUNS} is not as known: {'; '.join(lacking)}")


def _problem(tree: ast.Module, seam: Seam) -> str | None:
    scope: ast.AST | None = tree
    *outer, last = seam.name.split(".")
    for name in outer:
        scope = _find(scope, name)
        if not isinstance(scope, ast.ClassDef):
            return f"no class {name}"
    found = _find(scope, last)
    if found is None:
        return "not found"
    if isinstance(found, ast.ClassDef) and seam.accepts:
        found = _find(found, "__init__")
        if found is None:
            return "no __init__"
    if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = found.args
        names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        lacking = [a for a in seam.accepts if a not in names]
        if lacking:
            return f"does not take {', '.join(lacking)}"
    return None


def _find(scope: ast.AST, name: str) -> ast.AST | None:
    """What `name` is bound to in a module or class body, in branches of it too; the last binding counts."""
    found = None
    for node in _statements(scope.body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            bound = [node.name]
        elif isinstance(node, ast.Assign):
            bound = [t.id for t in node.targets if isinstance(t, ast.Name)]
        elif isinstance(node, ast.AnnAssign):
            bound = [node.target.id] if isinstance(node.target, ast.Name) else []
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound = [a.asname or a.name for a in node.names]
        else:
            continue
        if name in bound:
            found = node
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            for branch in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, branch, []))
