"""TransformerEngine's ``common``: Megatron-core reads only ``recipe``."""

from . import recipe

__all__ = ["recipe"]
