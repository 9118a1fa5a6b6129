"""Identity of a model's weights: a fingerprint that does not depend on layout or engine.

`weights` computes and compares fingerprints; `alignkit.megatron.fingerprint` and `alignkit.vllm.fingerprint` say which
rows and columns of the HF tensors a rank holds. docs/identity.md. Public: the names in `__all__`.
"""

from .weights import Fingerprint, of_checkpoint

__all__ = ["Fingerprint", "of_checkpoint"]
