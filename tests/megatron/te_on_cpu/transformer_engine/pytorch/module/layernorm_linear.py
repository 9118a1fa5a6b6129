"""TransformerEngine 2.16's `LayerNormLinear`, for RMSNorm alone.

Besides the attributes of `Linear`, alignkit reads ``layer_norm_weight``, ``eps``, ``normalization``,
``zero_centered_gamma`` and ``return_layernorm_output``.
"""

import torch

from ..ops.basic.rmsnorm import rms_norm
from .base import no_torch_dynamo
from .linear import _Linear


class LayerNormLinear(_Linear):
    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        init_method=None,
        bias=True,
        normalization="LayerNorm",
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        return_layernorm_output=False,
        return_layernorm_output_gathered=False,
        parameters_split=None,
        zero_centered_gamma=False,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_wgrad=False,
        ub_bulk_dgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        name=None,
    ):
        super().__init__(name)
        if normalization != "RMSNorm":
            raise NotImplementedError(normalization)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.normalization = normalization
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered if return_layernorm_output else False
        self.zero_centered_gamma = zero_centered_gamma
        self.symmetric_ar_type = symmetric_ar_type
        self._create(in_features, out_features, bias, return_bias, tp_group, tp_size, sequence_parallel, parallel_mode)
        self.eps = eps
        ones = float(not zero_centered_gamma)
        self.register_parameter(
            "layer_norm_weight",
            torch.nn.Parameter(torch.empty(self.in_features, device=device, dtype=params_dtype)),
            init_fn=lambda weight: torch.nn.init.constant_(weight, ones),
        )
        self.layer_norm_bias = None
        self._register(params_dtype, device, init_method)

    def reset_parameters(self, defer_init=False):
        super().reset_parameters(defer_init)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    @no_torch_dynamo
    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        return self._product(rms_norm(inp, self.layer_norm_weight, self.eps, self.zero_centered_gamma))
