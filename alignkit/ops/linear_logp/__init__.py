"""Log-probabilities of target tokens, from hidden states or from logits, with one set of bits.

docs/contract.md, "Log-softmax over the vocabulary". The vocabulary is cut into tiles at fixed global ids; a tile's
statistics are integers, so neither the order of a sum nor the rank that computes it can change a bit. Ranks exchange
statistics, and logits only of a tile that a shard's border cuts. The [N, V] logits are taken a block of rows and columns at a
time, and not stored unless `keep_logits` asks for it.
"""

from .api import linear_logp, logp_from_logits
from .forward import head_logits, log_softmax, token_logp

__all__ = ["head_logits", "linear_logp", "log_softmax", "logp_from_logits", "token_logp"]
