"""verl's part of a vLLM worker. Its name travels in the engine's configuration, so that a worker that cannot import it does
not start."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import monkey_patch_compute_logits, vLLMColocateWorkerExtension

from alignkit.errors import UnsupportedError
from alignkit.integrations.functions import require_known
from alignkit.vllm.policy import VOCAB_SIZE

require_known("verl", vLLMColocateWorkerExtension.monkey_patch_model, monkey_patch_compute_logits)


class WorkerExtension(vLLMColocateWorkerExtension):
    """Verl's, on an aligned worker. The engine was given the size of the vocabulary, so that the logits of other ids are
    -inf already; and what new weights have done to the model is looked at."""

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        if banned_token_ids:
            raise UnsupportedError("banned_token_ids: placeholders of pictures and videos are not supported")
        given = self.vllm_config.additional_config[VOCAB_SIZE]
        if given != min(vocab_size, self.model_config.get_vocab_size()):
            raise UnsupportedError(f"vocab_size: {vocab_size}, but the engine was made for {given} ids")

    def update_weights_from_ipc(self, *args, **kwargs) -> None:
        super().update_weights_from_ipc(*args, **kwargs)
        self._watch.inspect()
