"""TransformerEngine 2.16's `RMSNorm` module. alignkit finds it by this path and reads its weight and eps."""

from ..ops import RMSNorm as _RMSNormOp


class RMSNorm(_RMSNormOp):
    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        **kwargs,
    ):
        if params_dtype is not None:
            kwargs["dtype"] = params_dtype
        self.sequence_parallel = sequence_parallel
        shape = hidden_size if normalized_shape is None else normalized_shape
        super().__init__(shape, eps=eps, zero_centered_gamma=zero_centered_gamma, **kwargs)

    def reset_parameters(self, defer_init=None):
        super().reset_parameters()
        if self.sequence_parallel is not None:
            self.weight.sequence_parallel = self.sequence_parallel
