"""The front end's part: requests are refused where they are made, before they reach a worker."""

from __future__ import annotations

import functools

from vllm.v1.engine.input_processor import InputProcessor

from alignkit.errors import UnsupportedError
from alignkit.vllm import versions
from alignkit.vllm.refuse import refuse_config, request_reasons
from alignkit.vllm.worker_class import is_aligned


class RefusedRequest(UnsupportedError, versions.resolve(versions.installed().client_error)):
    """Of vLLM's kind too: of other errors, its server tells a client nothing."""


class AlignedInputProcessor(InputProcessor):
    def __init__(self, vllm_config, *args, **kwargs) -> None:
        _require_aligned(vllm_config)  # an engine starts here whatever made its configuration
        refuse_config(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def _validate_params(self, params, *args, **kwargs):
        mode = self.model_config.logprobs_mode
        reasons = request_reasons(params, mode)
        if reasons:
            raise RefusedRequest(f"alignkit cannot keep {mode} aligned under {', '.join(reasons)}")
        return super()._validate_params(params, *args, **kwargs)


def refuse_stock(validate_params):
    """`InputProcessor._validate_params` for as long as vLLM is patched: a stock engine gets no requests."""

    @functools.wraps(validate_params)
    def validate(self, *args, **kwargs):
        _require_aligned(self.vllm_config)
        return validate_params(self, *args, **kwargs)

    return validate


def _require_aligned(vllm_config) -> None:
    if not is_aligned(vllm_config):
        raise RefusedRequest(
            "this engine, or its configuration, was made before patch_vllm(): "
            "make it after, or undo the patch to use it as it is"
        )
