from .base import TransformerEngineBaseModule


class GroupedLinear(TransformerEngineBaseModule):
    """Of mixtures of experts; Megatron-core derives its own from it."""
