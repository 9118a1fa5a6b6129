"""Kernels of qk_norm_rope, one per backend, fastest first.

`dispatch.order` reads `ORDER` by the op names of `dispatch.OPS`.
"""

from __future__ import annotations

from ...runtime.dispatch import ONE_PER_BACKEND

ORDER = {"qk_norm_rope": ONE_PER_BACKEND}
