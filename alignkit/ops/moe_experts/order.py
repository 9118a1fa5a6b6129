"""The ways to compute experts, fastest first: their products, those of the gradients of their matrices, and what is done
with rows. A grouped kernel comes before "each" of its backend."""

from __future__ import annotations

from ...runtime.dispatch import PLAIN, Kernel
from ...runtime.families import NATIVE, REFERENCE, TRITON

_EACH = tuple(Kernel("each", backend, "each") for backend in (TRITON, NATIVE, REFERENCE))

ORDER = {"moe_products": _EACH, "moe_gradients": _EACH, "moe_rows": PLAIN}
