"""Llama as data: the plain dense family.

`Family` documents the fields. `file` and `structure` hold vLLM's names; the other names are those of Hugging Face
checkpoints (config.json and tensors).
"""

from alignkit.models.family import Family

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    may_be_absent=("num_key_value_heads", "head_dim"),
    rope_base=10000.0,
    sliding_window="null",
    file="llama.py",
    structure=("LlamaForCausalLM", "LlamaModel", "LlamaDecoderLayer", "LlamaAttention", "LlamaMLP"),
)
