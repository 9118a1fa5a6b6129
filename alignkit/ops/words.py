"""Problems of ops described in words, ``name=value``, for `alignkit explain`.

The functions of a record's `described` (ops/<op>/op.py) read `Words` and return an operand description of problem.py. A
new name needs its meaning in `MEANINGS`, which `alignkit explain list` prints.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..config import NO, YES
from ..errors import InputError
from ..runtime.operands import Operand

MEANINGS = {
    "rows": "tokens, the M of a GEMM; for moe_products, moe_gated and moe_gradients, pairs of a token and an expert",
    "k": "length of the dot products; for head_products, the width of the hidden states",
    "n": "output features, the N of a GEMM",
    "h": "width of a row",
    "ids": "size of the vocabulary shard",
    "heads": "query heads",
    "kv_heads": "KV heads (default: as many as heads)",
    "head_dim": "width of a head",
    "seqs": "sequences of the batch",
    "page": "tokens per page of the KV cache (vLLM's block_size)",
    "pages": "width of the block table",
    "top_k": "experts of a token",
    "experts": "experts of this rank",
    "leaves": "equal parts of k; each is summed in order, and a balanced tree adds the sums (1: k is not split)",
    "dtype": "of the inputs: bf16, fp16 or fp32",
    "out_dtype": "of the result (default: that of the inputs)",
    "bias": "yes with a bias",
    "accumulate": "yes if the products are added to an existing fp32 output",
    "aligned": "no if an address is not a multiple of 16 bytes",
    "gathered": "yes if rows are in the order of tokens, no if sorted by expert",
    "scattered": "yes if the experts' matrices are not one tensor",
    "keep_logits": "yes if the logits are kept for the backward pass",
    "family": "device family: cpu, or sm90 for Hopper GPUs (default)",
    "backend": "sm90: triton (Triton, cuBLASLt) or cuda (also CUDA); cpu: cpu or reference (default: the fastest)",
}
"""Meanings of the names in NAME=VALUE, as `alignkit explain list` prints them."""
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Words:
    """Arguments in the form ``name=value``.

    An op reads the names that it takes. A name without a default is required. `used` collects the names that were read,
    with their values; `missing` collects the required names that were absent.
    """

    def __init__(self, words: Sequence[str]):
        self._given: dict[str, str] = {}
        for word in words:
            name, separator, value = word.partition("=")
            if not separator:
                raise InputError(f"NAME=VALUE: expected the form NAME=VALUE, such as rows=64, got {word!r:.80}")
            if not value:
                raise InputError(f"{name}: value is missing, got {word!r}")
            if name in self._given:
                raise InputError(f"{name}: given more than once, as {self._given[name]} and {value}")
            self._given[name] = value
        self.used: dict[str, str] = {}
        self.missing: list[str] = []

    def _take(self, name: str, default: str | None) -> str:
        value = self._given.pop(name, default)
        if value is None:  # continue with a placeholder, to report all missing names at once
            self.missing.append(name)
            value = "64"
        self.used[name] = value
        return value

    def one_of(self, name: str, allowed: Sequence[str], default: str) -> str:
        value = self._take(name, default)
        if value not in allowed:
            raise InputError(f"{name}: must be one of {', '.join(allowed)}, got {value!r}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        value = self._take(name, None if default is None else str(default))
        if not value.isdecimal():
            raise InputError(f"{name}: must be an integer >= 0, got {value!r}")
        if len(value) > 10:
            raise InputError(f"{name}: must have at most 10 digits, got {value}")
        return int(value)

    def flag(self, name: str, default: str = "no") -> bool:
        return self.one_of(name, (*YES, *NO), default) in YES

    def dtype(self, name: str, default: str = "bf16") -> torch.dtype:
        return TYPES[self.one_of(name, tuple(TYPES), default)]

    def reject_unused(self, op: str) -> None:
        for name in self._given:
            raise InputError(f"NAME: must be one that {op} takes ({', '.join(self.used)}), got {name!r:.80}")


def dense(dtype: torch.dtype, *shape: int, aligned: bool = True) -> Operand:
    """Return the description of a contiguous tensor."""
    return torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype, aligned
