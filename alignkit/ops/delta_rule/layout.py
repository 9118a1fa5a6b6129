"""Layout of the page that holds the state of a sequence: what a decode step reads and writes.

A page has a row of fp32 words for each v head, in this order:

| part | shape | content |
|---|---|---|
| s | K, V fp32 | the state before the open chunk |
| k | CHUNK, K of the model type | keys of the open chunk's rows |
| r | CHUNK, V of the model type | their right-hand sides R |
| g | CHUNK fp32 | their sums of log decays G |
| d | CHUNK, CHUNK fp32 | their rows of the inverse D; the rest of a row is 0 |

Rows that the open chunk does not have yet hold anything.
"""

from __future__ import annotations

import torch

CHUNK = 16
"""contract: tokens per chunk, at absolute positions of the sequence; one step of the tensor core's k."""


def sizes(k: int, v: int, dtype: torch.dtype) -> list[int]:
    """Return the fp32 words of the parts s, k, r, g and d of a page, per v head.

    Args:
        k: Dimension of the heads of k.
        v: Dimension of the heads of v.
        dtype: Model type.
    """
    row = CHUNK * dtype.itemsize // 4
    return [k * v, row * k, row * v, CHUNK, CHUNK * CHUNK]


class Page:
    """Views of the parts of one page [Hv, words]."""

    def __init__(self, page: torch.Tensor, k: int, v: int, dtype: torch.dtype):
        s, keys, r, self.g, d = page.split(sizes(k, v, dtype), dim=1)
        self.s, self.d = s.unflatten(1, (k, v)), d.unflatten(1, (CHUNK, CHUNK))
        self.k = keys.view(dtype).unflatten(1, (CHUNK, k))
        self.r = r.view(dtype).unflatten(1, (CHUNK, v))
