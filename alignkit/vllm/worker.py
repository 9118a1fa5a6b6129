"""The worker of an aligned engine. Its class name travels in the engine's configuration, so a process that
cannot import it, in-process engine or worker on another host, fails instead of staying stock."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import vllm
from vllm.distributed import get_ep_group, get_tp_group
from vllm.logger import init_logger

from alignkit.contract import contract_id
from alignkit.dist import TP, symmetric
from alignkit.errors import UnsupportedError
from alignkit.runtime import dispatch
from alignkit.runtime.families import on_host
from alignkit.vllm.layers import aligned_layers
from alignkit.vllm.live import Watch
from alignkit.vllm.parallel import name_groups
from alignkit.vllm.refuse import refuse_config
from alignkit.vllm.sampler import AlignedSampler
from alignkit.vllm.versions import installed, resolve
from alignkit.vllm.warmup import warm_up

logger = init_logger("vllm.alignkit")  # vLLM's logging knows loggers below its own name only


class AlignedWorker(resolve(installed().worker)):
    def init_device(self) -> None:
        refuse_config(self.vllm_config)
        super().init_device()
        dispatch.name(self.device)  # raises where the device has none
        name_groups(self._replicated)
        if self.vllm_config.use_v2_model_runner:  # it makes its sampler when it loads the model
            return
        runner = self.model_runner
        if type(runner.sampler).__name__ != "Sampler":
            raise UnsupportedError(f"sampler {type(runner.sampler).__name__}")
        runner.sampler = AlignedSampler(self.model_config.logprobs_mode, self.model_config.use_fp64_gumbel)

    def load_model(self, **kwargs) -> None:
        with aligned_layers(), self._sampling():
            super().load_model(**kwargs)
        self._watch = Watch(self.model_runner, self.vllm_config)
        # Ranks that differ would still exchange tensors, of other bits.
        TP(self._ranks.cpu_group).check_same("vLLM worker", self._inspect)
        logger.info("aligned: contract %s", dispatch.family(self.device).contract_id)

    def compile_or_warm_up_model(self):
        if not on_host(self.device):
            warm_up(self.model_runner.get_model(), self.vllm_config, self._logprobs)
        times = super().compile_or_warm_up_model()
        self._watch.inspect()  # what was compiled, and is in CUDA graphs now
        return times

    def execute_model(self, scheduler_output):
        self._watch.step()
        return super().execute_model(scheduler_output)

    def execute_dummy_batch(self) -> None:
        self._watch.step()  # it has a part in what the experts give the other replicas
        super().execute_dummy_batch()

    def apply_model(self, fn):
        result = super().apply_model(fn)
        self._watch.inspect()
        return result

    def reload_weights(self, *args, **kwargs) -> None:
        super().reload_weights(*args, **kwargs)
        self._watch.inspect()

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._watch.inspect()

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        self._watch.inspect()

    def _logprobs(self, logits) -> None:
        if not self.vllm_config.use_v2_model_runner:
            AlignedSampler.compute_logprobs(logits)
            return
        from alignkit.vllm.sampler_v2 import token_logprobs

        for ids in (1, 2):  # a number of its own to the compiler, and any other
            token_logprobs(logits, torch.zeros(len(logits), ids, dtype=torch.int64, device=logits.device))

    def alignkit_status(self) -> dict:
        """What this worker runs now: contract id, backend, vLLM version, modules by aligned class, and whether it adds
        over ranks in symmetric memory. If a part was replaced, that it is not `patched`, and what was `replaced`."""
        try:
            facts = self._inspect()
        except UnsupportedError as e:
            return {"patched": False, "replaced": str(e), "vllm": vllm.__version__}
        return {"patched": True, **facts, "symmetric_memory": symmetric.used(self._ranks.device_group)}

    @property
    def _replicated(self) -> bool:
        """Whether replicas share experts. Those of a dense model share nothing."""
        return self.parallel_config.data_parallel_size > 1 and bool(self.model_config.is_moe)

    @property
    def _ranks(self):
        """All ranks that compute one model together."""
        return get_ep_group() if self._replicated else get_tp_group()

    def _sampling(self):
        if not self.vllm_config.use_v2_model_runner:
            return nullcontext()
        from alignkit.vllm.sampler_v2 import aligned_sampling

        return aligned_sampling()

    def _inspect(self) -> dict:
        return {
            "contract": contract_id(self.device),
            "backend": dispatch.name(self.device),
            "vllm": vllm.__version__,
            "modules": self._watch.inspect(),
        }
