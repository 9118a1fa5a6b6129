"""TransformerEngine 2.16's `Linear`, with tensor and sequence parallelism by Megatron-core's collectives.

The parameters are those that Megatron-core's wrapper passes. alignkit reads ``weight``, ``bias``, ``tp_group``,
``sequence_parallel``, and the attributes in ``required`` of its replacements in alignkit/megatron/te.py.
"""

import torch
import torch.nn.functional as F

from .base import TransformerEngineBaseModule, no_torch_dynamo


def normal_(weight):
    return torch.nn.init.normal_(weight, mean=0.0, std=0.023)


def set_tensor_model_parallel_attributes(tensor, is_parallel, dim, stride):
    tensor.tensor_model_parallel = is_parallel
    tensor.partition_dim = dim
    tensor.partition_stride = stride


class _Linear(TransformerEngineBaseModule):
    """Common part of Linear and LayerNormLinear; TransformerEngine has no such class."""

    def _create(
        self, in_features, out_features, bias, return_bias, tp_group, tp_size, sequence_parallel, parallel_mode
    ):
        self.in_features, self.out_features = in_features, out_features
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self._set_tensor_parallel(tp_group, tp_size)
        self.parallel_mode = parallel_mode
        if parallel_mode == "column":
            self.out_features = out_features // self.tp_size
        elif parallel_mode == "row":
            self.in_features = in_features // self.tp_size
        self.sequence_parallel = (self.tp_size > 1) and sequence_parallel
        self.ub_name = None

    def _register(self, params_dtype, device, init_method):
        self.weight_names, self.bias_names = ["weight"], ["bias"]
        self.parameter_split_sizes = [self.out_features]
        weight = torch.empty(self.out_features, self.in_features, device=device, dtype=params_dtype)
        self.register_parameter("weight", torch.nn.Parameter(weight), init_fn=init_method or normal_)
        if self.use_bias:
            bias = torch.empty(self.out_features, device=device, dtype=params_dtype)
            self.register_parameter("bias", torch.nn.Parameter(bias), init_fn=torch.nn.init.zeros_)
        else:
            self.bias = torch.Tensor().to(dtype=params_dtype, device=device)
        self.reset_parameters(defer_init=device == "meta")
        self.gemm_bias_unfused_add = self.parallel_mode == "row" and self.apply_bias

    def reset_parameters(self, defer_init=False):
        super().reset_parameters(defer_init)
        set_tensor_model_parallel_attributes(self.weight, True, 1 if self.parallel_mode == "row" else 0, 1)
        if self.use_bias and self.parallel_mode == "column":
            set_tensor_model_parallel_attributes(self.bias, True, 0, 1)
        elif self.use_bias:
            self.bias.sequence_parallel = self.sequence_parallel

    def _product(self, inp):
        from megatron.core.tensor_parallel import mappings

        if self.fuse_wgrad_accumulation:
            raise NotImplementedError("fuse_wgrad_accumulation")
        self.prepare_forward(inp)
        if self.parallel_mode == "column":
            if self.sequence_parallel:
                inp = mappings.gather_from_sequence_parallel_region(inp, group=self.tp_group)
            elif self.tp_size > 1:
                inp = mappings.copy_to_tensor_model_parallel_region(inp, group=self.tp_group)
        out = F.linear(inp, self.weight)
        if self.parallel_mode == "row":
            if self.sequence_parallel:
                out = mappings.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
            elif self.tp_size > 1:
                out = mappings.reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        if self.apply_bias:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class Linear(_Linear):
    def __init__(
        self,
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
        parameters_split=None,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False,
        ub_bulk_wgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        save_original_input=False,
        name=None,
    ):
        super().__init__(name)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.rng_tracker_name = rng_tracker_name
        self.symmetric_ar_type = symmetric_ar_type
        self.save_original_input = save_original_input
        self._create(in_features, out_features, bias, return_bias, tp_group, tp_size, sequence_parallel, parallel_mode)
        self._register(params_dtype, device, init_method)

    @no_torch_dynamo
    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        return self._product(inp)
