"""C++ qk_norm_rope: the rms_norm kernel, then the rope kernel (no kernel of its own)."""

from __future__ import annotations

from ..rms_norm import cpu as norm
from ..rope import cpu as rotation
from .separate import compose

forward, backward = compose(norm, rotation)
