"""The worker of an aligned engine. Its class name travels in the engine's configuration, so a process that
cannot import it, in-process engine or worker on another host, fails instead of staying stock."""
from __future__ import annotations

from contextlib import nullcontext

import torch
import vllm
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.attention import Attention

from alignkit import backends, symmetric
from alignkit.contract import contract_id
from alignkit.errors import UnsupportedError
from alignkit.ops import library
from alignkit.tp import TP
from alignkit.vllm.attention import AlignedAttentionImpl
from alignkit.vllm.layers import ALIGNED, aligned_layers
from alignkit.vllm.parallel import GROUP, EngineTP
from alignkit.vllm.refuse import refuse_config, refuse_model
from alignkit.vllm.sampler import AlignedSampler
from alignkit.vllm.seams import installed, resolve
from alignkit.vllm.warmup import warm_up


class AlignedWorker(resolve(installed().worker)):
    def init_device(self) -> None:
        refuse_config(self.vllm_config)
        super().init_device()
        backends.name(self.device)  # raises where the device has none
        library.name_group(GROUP, EngineTP())
        if self.vllm_config.use_v2_model_runner:  # it makes its sampler when it loads the model
            return
        runner = self.model_runner
        if type(runner.sampler).__name__ != "Sampler":
            raise UnsupportedError(f"sampler {type(runner.sampler).__name__}")
        runner.sampler = AlignedSampler(self.model_config.logprobs_mode, self.model_config.use_fp64_gumbel)

    def load_model(self, **kwargs) -> None:
        with aligned_layers(), self._sampling():
            super().load_model(**kwargs)
        self._aligned = self._inspect()
        # Ranks that differ would still exchange tensors, of other bits.
        TP(get_tp_group().cpu_group).check_same("vLLM worker", lambda: dict(self._aligned))

    def compile_or_warm_up_model(self):
        if self.device.type == "cuda":
            warm_up(self.model_runner.get_model(), self.vllm_config, self._logprobs)
        return super().compile_or_warm_up_model()

    def _logprobs(self, logits) -> None:
        if not self.vllm_config.use_v2_model_runner:
            AlignedSampler.compute_logprobs(logits)
            return
        from alignkit.vllm.sampler_v2 import token_logprobs

        for ids in (1, 2):  # a number of its own to the compiler, and any other
            token_logprobs(logits, torch.zeros(len(logits), ids, dtype=torch.int64, device=logits.device))

    def alignkit_status(self) -> dict:
        """What this worker runs: contract id, backend, vLLM version, modules by aligned class, and whether it adds over ranks in
        symmetric memory."""
        return {"patched": True, **self._aligned, "symmetric_memory": symmetric.used(get_tp_group().device_group)}

    def _sampling(self):
        if not self.vllm_config.use_v2_model_runner:
            return nullcontext()
        from alignkit.vllm.sampler_v2 import aligned_sampling

        return aligned_sampling()

    def _inspect(self) -> dict:
        if self.vllm_config.use_v2_model_runner:
            from alignkit.vllm.sampler_v2 import refuse_sampling

            refuse_sampling(self.model_runner)
        model = self.model_runner.get_model()
        counts = refuse_model(model, tuple(ALIGNED.values()))
        attention = [m for m in model.modules() if isinstance(m, Attention)]
        stock = {type(m.impl).__name__ for m in attention} - {AlignedAttentionImpl.__name__}
        if stock:
            raise UnsupportedError(f"attention by {', '.join(sorted(stock))}")
        return {
            "contract": contract_id(self.device),
            "backend": backends.name(self.device),
            "vllm": vllm.__version__,
            "modules": {**counts, AlignedAttentionImpl.__name__: len(attention),
                        type(self.model_runner.sampler).__name__: 1},
        }
