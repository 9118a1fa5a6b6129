class DelayedScaling:
    """A recipe of fp8; Megatron-core derives one of its own from it."""
