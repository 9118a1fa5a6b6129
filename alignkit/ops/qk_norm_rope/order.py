"""The ways to normalise and rotate queries and keys, fastest first."""

from __future__ import annotations

from ...runtime.dispatch import PLAIN

ORDER = {"qk_norm_rope": PLAIN}
