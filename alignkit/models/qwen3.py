"""Qwen3 as data: Llama's layers with norms of queries and keys.

`Family` documents the fields. `file` and `structure` hold vLLM's names; the other names are those of Hugging Face
checkpoints (config.json and tensors).
"""

from alignkit.models.family import LAYER, QK_NORMS, Family

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    may_be_absent=(),
    rope_base=None,
    sliding_window="unused",
    file="qwen3.py",
    structure=("Qwen3ForCausalLM", "Qwen3Model", "Qwen3DecoderLayer", "Qwen3Attention", "Qwen2MLP"),
    layer=LAYER + QK_NORMS,
)
