"""TransformerEngine's FP8 switches: they record that FP8 is enabled, and quantize nothing.

alignkit reads ``FP8GlobalStateManager.is_fp8_enabled()`` and rejects the call if it is true.
"""

import contextlib


class FP8GlobalStateManager:
    enabled = False
    parameters = False

    @classmethod
    def is_fp8_enabled(cls):
        return cls.enabled

    @classmethod
    def with_fp8_parameters(cls):
        return cls.parameters


@contextlib.contextmanager
def _switched(name, enabled):
    before = getattr(FP8GlobalStateManager, name)
    setattr(FP8GlobalStateManager, name, enabled)
    try:
        yield
    finally:
        setattr(FP8GlobalStateManager, name, before)


def fp8_autocast(enabled=True, **_):
    return _switched("enabled", enabled)


def fp8_model_init(enabled=True, **_):
    return _switched("parameters", enabled)
