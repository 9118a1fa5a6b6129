"""Logprobs of target tokens from hidden states or logits, with the same bits.

Contract: docs/contract.md, "Log-softmax over the vocabulary". The vocabulary is cut into tiles at fixed global ids. A
tile's statistics are integers, so neither the order of a sum nor the rank that computes it can change a bit. Ranks
exchange statistics, and logits only of tiles that span two shards. The [N, V] logits are computed in blocks of rows and
columns and are not stored, unless `keep_logits` is set.

Public: names and signatures are documented in docs/api/ops.md.
"""

from .api import linear_logp, logp_from_logits
from .forward import head_logits, log_softmax, token_logp

__all__ = ["head_logits", "linear_logp", "log_softmax", "logp_from_logits", "token_logp"]
