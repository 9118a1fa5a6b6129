"""Names of TransformerEngine's ``distributed`` that Megatron-core imports. No test runs them."""


class CudaRNGStatesTracker:
    """RNG tracker that Megatron-core subclasses."""


def activation_recompute_forward(**_):
    raise NotImplementedError("recomputation that discards outputs")
