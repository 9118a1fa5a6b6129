"""The front end's input processor, which rejects unsupported requests before they reach a worker.

`refuse.request_rejection` decides which requests are unsupported; this file has only the hooks into vLLM's classes.
"""

from __future__ import annotations

import functools

from vllm.v1.engine.input_processor import InputProcessor

from alignkit.engines.hook_points import relies_on, replaces
from alignkit.errors import UnsupportedError
from alignkit.vllm import updates, versions
from alignkit.vllm.refuse import refuse_config, request_rejection
from alignkit.vllm.worker_class import is_aligned


@relies_on("exceptions.py:VLLMClientError", when="client_error")
class RefusedRequest(UnsupportedError, versions.resolve(versions.installed().client_error)):
    """A rejected request. Its second base is vLLM's client error: the server returns the message of no other error."""


@relies_on("v1/engine/llm_engine.py:InputProcessor")
@relies_on("v1/engine/async_llm.py:InputProcessor")
class AlignedInputProcessor(InputProcessor):
    @replaces(accepts="vllm_config renderer")
    def __init__(self, vllm_config, *args, **kwargs) -> None:
        _require_aligned(vllm_config)  # every engine passes here, however its configuration was created
        refuse_config(vllm_config)
        updates.started(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    @replaces(accepts="params supported_tasks")
    def _validate_params(self, params, *args, **kwargs):
        if (reason := updates.stopped(self.vllm_config)) is not None:
            raise RefusedRequest(f"vLLM engine: a step was rejected, so make a new engine. Reason: {reason}")
        model = self.model_config
        if (rejection := request_rejection(params, model.logprobs_mode, model.get_vocab_size())) is not None:
            raise RefusedRequest(rejection)
        return super()._validate_params(params, *args, **kwargs)

    @replaces(accepts="prompt_input prompt_type")
    def _validate_model_input(self, prompt_input, prompt_type) -> None:
        super()._validate_model_input(prompt_input, prompt_type)
        ids, vocab = prompt_input.get("prompt_token_ids") or (0,), self.model_config.get_vocab_size()
        # Without a tokenizer, vLLM checks no ids: it reads a padding row of the embedding, or beyond it.
        if wrong := [i for i in (min(ids), max(ids)) if not 0 <= i < vocab]:
            raise RefusedRequest(f"prompt_token_ids: must be in [0, {vocab}), the model's vocabulary, got {wrong[0]}")


def refuse_stock(validate_params):
    """Wrap `InputProcessor._validate_params` to reject the requests of stock engines while vLLM is patched."""

    @functools.wraps(validate_params)
    def validate(self, *args, **kwargs):
        _require_aligned(self.vllm_config)
        return validate_params(self, *args, **kwargs)

    return validate


def _require_aligned(vllm_config) -> None:
    if not is_aligned(vllm_config):
        raise RefusedRequest(
            "vLLM engine: must be created after patch_vllm(), but its configuration was created before patch_vllm(). "
            "Create a new engine, or undo the patch to use this engine unaligned"
        )
