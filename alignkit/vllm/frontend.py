"""The front end's processors: unsupported requests are rejected before they reach a worker, outputs carry epochs.

`refuse.request_rejection` decides which requests are unsupported; this file has only the hooks into vLLM's classes.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from alignkit.engines.hook_points import relies_on, replaces
from alignkit.errors import UnsupportedError
from alignkit.vllm import epochs, versions
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
        self._epochs = epochs.started(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    @replaces(accepts="resumable")
    def process_inputs(self, *args, resumable: bool = False, **kwargs):
        if resumable:  # vLLM keeps the KV cache of a stream between its inputs, beside requests in flight
            raise RefusedRequest("prompt: must be one prompt, got a stream of inputs. Send a request for each input")
        return super().process_inputs(*args, **kwargs)

    @replaces(accepts="params supported_tasks")
    def _validate_params(self, params, *args, **kwargs):
        if (reason := self._epochs.refusal()) is not None:
            raise RefusedRequest(reason)
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


@relies_on("v1/engine/output_processor.py:RequestState.__init__", "request_id parent_req request_index detokenizer")
class AlignedRequestState(RequestState):
    """A request whose finished output carries the epochs of its tokens."""

    @replaces(accepts="token_ids finish_reason")
    def _new_completion_output(self, token_ids, finish_reason, *args, **kwargs):
        if finish_reason is not None and (found := epochs.holder(self.request_id)) is not None:
            engine, tokens = found
            # All completions of a request share its parent, and are returned together or one by one.
            _, completions = vars(self.parent_req or self).setdefault("alignkit_epochs", (engine, {}))
            completions[str(self.request_index)] = tokens.spans, self.detokenizer.num_output_tokens()
        return super()._new_completion_output(token_ids, finish_reason, *args, **kwargs)

    @replaces(accepts="external_req_id outputs")
    def _new_request_output(self, external_req_id, outputs, *args, **kwargs):
        """Add the epochs of finished completions to ``kv_transfer_params``, which vLLM's server returns too.

        Under `epochs.KEY` are the contract id, and by the index of the completion its number of tokens and pairs of a
        first token and its epoch. `epochs.token_epochs` reads them.
        """
        output: Any = super()._new_request_output(external_req_id, outputs, *args, **kwargs)
        engine, completions = vars(self.parent_req or self).get("alignkit_epochs", (None, {}))
        if engine is not None and any(each is not None and each.finish_reason is not None for each in outputs):
            spans = {index: spans for index, (spans, _) in completions.items()}
            output.kv_transfer_params = {
                **(output.kv_transfer_params or {}),
                epochs.KEY: {
                    "contract": engine.contract,
                    "epochs": spans,
                    "tokens": {index: count for index, (_, count) in completions.items()},
                    "weights": {str(epoch): engine.weights.get(epoch) for own in spans.values() for _, epoch in own},
                },
            }
        return output


@relies_on("v1/engine/llm_engine.py:OutputProcessor")
@relies_on("v1/engine/async_llm.py:OutputProcessor")
class AlignedOutputProcessor(OutputProcessor):
    @replaces(accepts="request")
    def add_request(self, request, *args, **kwargs) -> None:
        super().add_request(request, *args, **kwargs)
        self.request_states[request.request_id].__class__ = AlignedRequestState


def _require_aligned(vllm_config) -> None:
    if not is_aligned(vllm_config):
        raise RefusedRequest(
            "vLLM engine: must be created after patch_vllm(), but its configuration was created before patch_vllm(). "
            "Create a new engine, or undo the patch to use this engine unaligned"
        )
