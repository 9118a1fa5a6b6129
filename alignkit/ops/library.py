"""Forward ops of a decoder as PyTorch custom ops, ``torch.ops.alignkit.*``, for engines that compile.

A compiler sees one opaque node with a known output shape and cannot change its arithmetic. The ops are forward only and
their outputs never alias inputs. Most compute the op of the same name in `alignkit.ops`. The others:

- `linear_fp32`: `linear` with an fp32 result.
- `add_rms_norm`: `rms_norm` with a residual.
- `rope_qk`: `rope` of queries and keys in one launch.
- `add`: the rounded sum of two tensors.

Engines call these ops many times per step and are host-bound between them. On a GPU most ops therefore compare only
shapes and dtypes, and run the full checks only if these do not match. The MoE ops, `sigmoid_mul` and
`row_parallel_linear` with a group always run the full checks.

vLLM's compiled graphs, which it caches on disk, contain the names and schemas of the ops and the names of groups.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UnsupportedError
from ._calls import in_default_mode
from .groups import register_group
from .record import Custom
from .registry import RECORDS

__all__ = ["register_group"]
_library = torch.library.Library("alignkit", "DEF")


def _define(custom: Custom) -> Any:
    name = custom.name
    _library.define(custom.schema)
    _library.impl(name, in_default_mode(custom.run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"alignkit::{name}", custom.fake, lib=_library)

    def backward(*_):
        raise UnsupportedError(
            f"alignkit::{name}: unsupported in a backward pass. Call the differentiable op of alignkit.ops instead"
        )

    torch.library.register_autograd(f"alignkit::{name}", backward, lib=_library)
    return getattr(torch.ops.alignkit, name).default


globals().update({custom.name: _define(custom) for record in RECORDS for custom in record.custom})


def __getattr__(name: str) -> Any:  # type checkers read it: the custom ops are attributes of this module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
