"""TransformerEngine's FP8 recipes, of which Megatron-core only subclasses `DelayedScaling`."""


class DelayedScaling:
    """Fp8 recipe that Megatron-core subclasses."""
