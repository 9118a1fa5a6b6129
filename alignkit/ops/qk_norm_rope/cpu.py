"""C++ qk_norm_rope: the rms_norm kernel, then the rope kernel. No fused kernel exists for CPUs."""

from __future__ import annotations

from ..rms_norm import cpu as norm
from ..rope import cpu as rotation
from .separate import compose

forward, backward = compose(norm, rotation)
