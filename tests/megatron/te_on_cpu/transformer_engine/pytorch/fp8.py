"""TransformerEngine's former path of `quantization`, from which Megatron-core imports."""

from .quantization import FP8GlobalStateManager, fp8_autocast, fp8_model_init

__all__ = ["FP8GlobalStateManager", "fp8_autocast", "fp8_model_init"]
