"""The references of RMSNorm and of rope, one after the other."""

from __future__ import annotations

from ..rms_norm import reference as norm
from ..rope import reference as rotation
from .separate import one_after_the_other

forward, backward = one_after_the_other(norm, rotation)
