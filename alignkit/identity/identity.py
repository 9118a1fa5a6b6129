"""`Identity`: the kernels and weights of one side of a comparison. docs/identity.md describes where it is stored.

This file imports no op: `alignkit.drift` and `alignkit watch` read identities without kernels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import InputError

MIXED = -1
"""Epoch of a token whose KV cache has entries of several epochs: its logprob belongs to no model."""
MAX_CONTRACT = 200
"""Maximum length of a contract id, in characters."""
_DIGEST = re.compile(r"[0-9a-f]{1,64}", re.ASCII)


@dataclass(frozen=True)
class Identity:
    """Identity of an engine at one moment: its kernels, its weights, and its count of changes of the weights.

    None means unknown. An unknown value is never assumed to be equal to another one.

    Attributes:
        contract: Contract id that the engine reports; ``"stock"`` for an unpatched engine.
        weights: `Fingerprint.digest` of the weights: 1 to 64 hexadecimal digits in lower case, or None.
        epoch: Number of changes of the engine's weights since its start, in [0, 2^63), or None. `weights` are those of
            this epoch. Epochs of different engines are not comparable.

    Raises:
        InputError: A field is invalid. Names the field.
    """

    contract: str
    weights: str | None = None
    epoch: int | None = None

    def __post_init__(self) -> None:
        contract, weights, epoch = self.contract, self.weights, self.epoch
        if not (
            isinstance(contract, str)
            and 0 < len(contract) <= MAX_CONTRACT
            and contract.isascii()
            and contract.isprintable()
        ):
            raise InputError(
                f"contract: expected a string of 1 to {MAX_CONTRACT} printable ASCII characters, got {contract!r:.80}"
            )
        if weights is not None and not (isinstance(weights, str) and _DIGEST.fullmatch(weights)):
            raise InputError(
                f"weights: expected a digest of 1 to 64 hexadecimal digits in lower case or None, got {weights!r:.80}"
            )
        if epoch is not None and not (type(epoch) is int and 0 <= epoch < 2**63):
            raise InputError(f"epoch: expected an int in [0, 2^63) or None, got {epoch!r:.80}")
