"""Reference qk_norm_rope: the RMSNorm reference, then the rope reference, with the bits of the CPU family."""

from __future__ import annotations

from ..rms_norm import reference as norm
from ..rope import reference as rotation
from .separate import compose

forward, backward = compose(norm, rotation)
