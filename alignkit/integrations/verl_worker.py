"""The extension that verl adds to vLLM workers.

The engine's configuration carries its name, `ALIGNED_EXTENSION` of `alignkit.integrations.verl`. A worker that cannot
import it fails to start. It is alone in this file because the import needs verl's vLLM modules.
"""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import monkey_patch_compute_logits, vLLMColocateWorkerExtension

from alignkit.errors import UnsupportedError
from alignkit.integrations.functions import require_tested
from alignkit.vllm.policy import VOCAB_SIZE

require_tested("verl", vLLMColocateWorkerExtension.monkey_patch_model, monkey_patch_compute_logits)


class WorkerExtension(vLLMColocateWorkerExtension):
    """The worker extension of verl, for an aligned worker.

    `AlignedLogitsProcessor` already masks ids beyond the vocabulary, so verl's own mask is omitted. After a weight
    update the worker checks its model.
    """

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        if banned_token_ids:
            raise UnsupportedError(
                "banned_token_ids: must be empty, because placeholder ids of images and videos are not supported, "
                f"got {banned_token_ids!r:.80}"
            )
        given = self.vllm_config.additional_config[VOCAB_SIZE]
        padded = self.model_config.get_vocab_size()
        if given != min(vocab_size, padded):
            raise UnsupportedError(
                f"vocab_size: verl passes {vocab_size} (at most the model's {padded} are used), but the vLLM engine "
                f"was created with {given}; both must be equal"
            )

    def update_weights_from_ipc(self, *args, **kwargs) -> None:
        super().update_weights_from_ipc(*args, **kwargs)
        self._watch.inspect()
