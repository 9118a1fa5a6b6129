"""Mistral without a sliding window as data: Llama's layers.

`Family` documents the fields. `file`, `structure` and the first name in `off` are vLLM's; the other names are those of
Hugging Face checkpoints (config.json and tensors).
"""

from alignkit.models.family import Family

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    may_be_absent=("head_dim",),
    rope_base=10000.0,
    sliding_window="must be null",
    file="mistral.py",
    structure=("MistralForCausalLM", "MistralModel", "MistralDecoderLayer", "MistralAttention", "LlamaMLP"),
    off=(("do_llama_4_scaling", "llama_4_scaling"),),
)
