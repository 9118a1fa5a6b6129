"""The worker extension for verl: a class whose methods vLLM adds to its workers.

vLLM imports the class by the name `ALIGNED_EXTENSION` of `alignkit.integrations.verl`, so both names change together.
A worker that cannot import the class fails to start. The class has its own file because it needs verl's vLLM modules.
"""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import monkey_patch_compute_logits, vLLMColocateWorkerExtension

from alignkit.errors import UnsupportedError
from alignkit.identity import sync
from alignkit.integrations.functions import require_tested
from alignkit.vllm.policy import VOCAB_SIZE

require_tested("verl", vLLMColocateWorkerExtension.monkey_patch_model, monkey_patch_compute_logits)


class WorkerExtension(vLLMColocateWorkerExtension):
    """The worker extension of verl, for an aligned worker.

    `AlignedLogitsProcessor` already masks ids beyond the vocabulary, so verl's own mask is omitted. After a weight
    sync the worker checks its model, and requires the trainer's weights.
    """

    _alignkit_trainer: bytes | None = None

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        if banned_token_ids:
            raise UnsupportedError(
                "model: must be text-only, because images and videos are not supported; verl passed their placeholder "
                f"ids as banned_token_ids, got {banned_token_ids!r:.80}"
            )
        given = self.vllm_config.additional_config[VOCAB_SIZE]
        padded = self.model_config.get_vocab_size()
        if given != (used := min(vocab_size, padded)):
            raise UnsupportedError(
                f"vocab_size: verl's value must equal vLLM's (additional_config.{VOCAB_SIZE} = {given}), got "
                f"{used}, the smaller of verl's {vocab_size} and the model's {padded}"
            )

    def update_weights_from_ipc(self, *args, **kwargs) -> None:
        self._alignkit_trainer = error = None
        try:
            super().update_weights_from_ipc(*args, **kwargs)
        except Exception as e:
            error = e
        self.alignkit_verify(self._alignkit_trainer, error)
        self._watch.inspect()

    def _update_weights(self, weights, *args, **kwargs) -> None:
        weights, trainer = sync.take(weights)
        self._alignkit_trainer = trainer or self._alignkit_trainer
        super()._update_weights(weights, *args, **kwargs)

    def update_verl_delta_weights(self, *args, **kwargs) -> None:
        raise UnsupportedError(
            "actor_rollout_ref.rollout.checkpoint_engine.backend: must send whole tensors, because each sync is "
            "compared with the trainer's weights; 'delta_sharded' sends changed elements"
        )
