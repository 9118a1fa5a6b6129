"""The records of all ops. A new op needs its line here."""

from __future__ import annotations

from .attention.op import OP as _attention
from .gated_delta_rule.op import OP as _gated_delta_rule
from .linear.op import OP as _linear
from .linear_logp.op import OP as _linear_logp
from .moe_experts.op import OP as _moe_experts
from .moe_router.op import OP as _moe_router
from .qk_norm_rope.op import OP as _qk_norm_rope
from .record import Op
from .rms_norm.op import OP as _rms_norm
from .rope.op import OP as _rope
from .sigmoid_mul.op import OP as _sigmoid_mul
from .silu_mul.op import OP as _silu_mul

RECORDS: tuple[Op, ...] = (
    _attention,
    _gated_delta_rule,
    _linear,
    _linear_logp,
    _moe_experts,
    _moe_router,
    _qk_norm_rope,
    _rms_norm,
    _rope,
    _sigmoid_mul,
    _silu_mul,
)
