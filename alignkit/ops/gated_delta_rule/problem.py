"""The gated delta rule's backward as it is described to those who may compute it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Delta(NamedTuple):
    backend: str
    """The fastest that may compute it."""
    dtype: torch.dtype
