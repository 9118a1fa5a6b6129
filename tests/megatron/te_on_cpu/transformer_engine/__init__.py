"""Plain-torch implementation of the TransformerEngine 2.16 interface that Megatron-core's layer specs use.

TransformerEngine itself needs a GPU; test_te_cuda.py runs it. This package has TransformerEngine's module paths, names
of classes, attributes and parameters, and state dicts, so Megatron-core's wrappers run unchanged. Quantization and
communication overlap are not implemented. Megatron-core compares ``__version__`` to decide which names to import and
which arguments to pass.
"""

from . import common, pytorch

__version__ = "2.16.1"
__all__ = ["common", "pytorch"]
