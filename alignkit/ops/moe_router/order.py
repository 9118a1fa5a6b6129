"""Table of the kernels of the router (`dispatch.OPS`): one per backend, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import ONE_PER_BACKEND

ORDER = {"moe_router": ONE_PER_BACKEND}
