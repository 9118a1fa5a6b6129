"""TransformerEngine 2.16's interface, as far as Megatron-core's layer specs use it, in plain torch.

TransformerEngine itself needs a GPU. Class, attribute and parameter names, where the classes are defined and what their state
dicts hold are its own, so Megatron-core's wrappers of them are built and run as they are; what is quantised or overlapped
is not there.
"""

from . import common, pytorch

__version__ = "2.16.1"
__all__ = ["common", "pytorch"]
