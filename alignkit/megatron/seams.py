"""The names of Megatron-core that alignkit relies on, version by version. The one file with versions in it.

`NAMES` lists what every known version must have; `resolve` looks it up in an unpacked wheel without importing
it, so that a test on any Python can check versions that it cannot install.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from alignkit.errors import UnsupportedError

VERSIONS = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")

HOOK_VERSIONS = ("0.18.2", "0.19.2")
"""Versions whose GPTModel.forward takes `output_processor`; before them alignkit has a path of its own."""

NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "models/gpt/gpt_model.py": {
        "GPTModel.__init__": ("config", "vocab_size"),
        "GPTModel._preprocess": ("input_ids", "position_ids", "inference_context", "packed_seq_params"),
        "GPTModel._postprocess": ("hidden_states", "labels"),
    },
    "transformer/transformer_block.py": {
        "TransformerBlock.forward": (
            "hidden_states",
            "attention_mask",
            "attention_bias",
            "inference_context",
            "packed_seq_params",
        )
    },
    "transformer/transformer_layer.py": {"TransformerLayer": ()},
    "transformer/attention.py": {"SelfAttention": (), "apply_rotary_pos_emb": ()},
    "transformer/dot_product_attention.py": {
        "DotProductAttention.forward": (
            "query",
            "key",
            "value",
            "attention_mask",
            "attn_mask_type",
            "attention_bias",
            "packed_seq_params",
        )
    },
    "transformer/mlp.py": {"MLP.forward": ("hidden_states", "per_token_scale")},
    "transformer/torch_norm.py": {"WrappedTorchNorm.__new__": ("config", "hidden_size", "eps")},
    "transformer/identity_op.py": {"IdentityOp": (), "IdentityFuncOp": ()},
    "fusions/fused_bias_dropout.py": {"get_bias_dropout_add": ("training", "fused")},
    "fusions/fused_softmax.py": {"FusedScaleMaskSoftmax": ()},
    "models/common/language_module/language_module.py": {"LanguageModule": ()},
    "models/common/embeddings/language_model_embedding.py": {"LanguageModelEmbedding": ()},
    "models/common/embeddings/rotary_pos_embedding.py": {
        "RotaryEmbedding.forward": ("max_seq_len", "offset", "packed_seq")
    },
    "models/common/embeddings/rope_utils.py": {
        "apply_rotary_pos_emb": ("t", "freqs", "config", "cu_seqlens", "mscale")
    },
    "tensor_parallel/layers.py": {
        "ColumnParallelLinear.forward": ("input_", "weight"),
        "ColumnParallelLinear._forward_impl": ("input", "weight"),
        "RowParallelLinear.forward": ("input_",),
        "VocabParallelEmbedding": (),
    },
    "tensor_parallel/cross_entropy.py": {
        "_VocabParallelCrossEntropy.forward": ("vocab_parallel_logits", "target", "label_smoothing"),
        "vocab_parallel_cross_entropy": ("vocab_parallel_logits", "target", "label_smoothing"),
    },
    "tensor_parallel/random.py": {
        "CudaRNGStatesTracker.fork": (),
        "_get_cuda_rng_state": (),
        "_set_cuda_rng_state": (),
    },
}
"""File (under ``megatron/core``) -> name -> parameters it must take, which alignkit passes or receives."""


def names(version: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """`NAMES` with what is particular to `version`. Raises UnsupportedError for an unknown version."""
    check_version(version)
    table = {file: dict(entries) for file, entries in NAMES.items()}
    if version in HOOK_VERSIONS:
        hook = ("output_processor", "output_processor_context")
        for method in ("GPTModel.forward", "GPTModel._postprocess"):
            table["models/gpt/gpt_model.py"][method] = table["models/gpt/gpt_model.py"].get(method, ()) + hook
    if version == "0.19.2":
        table["tensor_parallel/cross_entropy.py"]["vocab_parallel_cross_entropy"] += ("tp_group",)
    return table


def release(version: str) -> str:
    """The known version that `version` is. Megatron 0.19 adds the commit of any git checkout around it
    (0.19.2+9d061af), one that merely holds the virtual environment too. Raises UnsupportedError for an unknown
    version."""
    version = version.partition("+")[0]
    check_version(version)
    return version


def check_version(version: str) -> None:
    """UnsupportedError unless `version` is one that alignkit has been run with."""
    if version not in VERSIONS:
        raise UnsupportedError(f"megatron-core: version {version} is unknown, not {', '.join(VERSIONS)}")


def resolve(core: Path, version: str) -> list[str]:
    """What `version`'s table names and the sources under `core` (a ``megatron/core`` folder) lack.

    [] if nothing. Nothing is imported.
    """
    missing = []
    for file, entries in names(version).items():
        path = core / file
        if not path.exists():
            missing.append(file)
            continue
        body = ast.parse(path.read_text()).body
        for name, parameters in entries.items():
            node = _find(body, name.split("."))
            if node is None:
                missing.append(f"{file}:{name}")
            elif parameters:
                arguments = node.args
                known = {a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs}
                missing += [f"{file}:{name}({p})" for p in parameters if p not in known]
    return missing


def _find(body: list[ast.stmt], path: list[str]) -> Any:
    """The definition, or the import, that binds the dotted `path` in `body`."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == path[0]:
            return node if len(path) == 1 else _find(node.body, path[1:])
        if (
            isinstance(node, ast.ImportFrom)
            and len(path) == 1
            and any((a.asname or a.name) == path[0] for a in node.names)
        ):
            return node
    return None
