"""Qwen2 as data: Llama's layers with QKV biases.

`Family` documents the fields. `file` and `structure` hold vLLM's names; the other names are those of Hugging Face
checkpoints (config.json and tensors).
"""

from alignkit.models.family import LAYER, QKV_BIASES, Family

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    may_be_absent=("head_dim",),
    rope_base=None,
    sliding_window="unused",
    file="qwen2.py",
    structure=("Qwen2ForCausalLM", "Qwen2Model", "Qwen2DecoderLayer", "Qwen2Attention", "Qwen2MLP"),
    layer=LAYER + QKV_BIASES,
    heads_fill_hidden=True,
)
