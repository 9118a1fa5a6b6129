"""TransformerEngine 2.16's `GroupedLinear`, without bias and without tensor parallelism of its own.

alignkit reads ``num_gemms`` and ``weight0``, ``weight1``, ..., and the attributes in ``required`` of its replacement in
alignkit/megatron/te.py. Megatron-core's wrapper calls ``init_fp8_metadata``.
"""

import torch
import torch.nn.functional as F

from .base import TransformerEngineBaseModule, no_torch_dynamo


class GroupedLinear(TransformerEngineBaseModule):
    """One linear layer per MoE expert, applied to inputs grouped by expert."""

    def __init__(
        self,
        num_gemms,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        device="cuda",
        ub_overlap_rs=False,
        ub_overlap_ag=False,
        ub_name=None,
        delay_wgrad_compute=False,
        save_original_input=False,
        name=None,
        **newer,
    ):
        super().__init__(name)
        if bias or (parallel_mode is not None and tp_size > 1):
            raise NotImplementedError("bias, or tensor parallelism of its own")
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.parallel_mode = parallel_mode
        self._set_tensor_parallel(tp_group, tp_size)
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        for i in range(num_gemms):
            weight = torch.empty(out_features, in_features, device=device, dtype=params_dtype)
            self.register_parameter(f"weight{i}", torch.nn.Parameter(weight), init_fn=init_method)
            setattr(self, f"bias{i}", torch.Tensor().to(dtype=params_dtype, device=device))
        self.reset_parameters(defer_init=device == "meta")

    def init_fp8_metadata(self, num_gemms=1):
        self.fast_setattr("fp8_initialized", True)

    @no_torch_dynamo
    def forward(self, inp, m_splits, is_first_microbatch=None):
        self.prepare_forward(inp)
        parts = torch.split(inp, list(m_splits))
        out = torch.cat([F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)])
        return (out, [getattr(self, f"bias{i}") for i in range(self.num_gemms)]) if self.return_bias else out
