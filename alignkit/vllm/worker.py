"""The worker class of an aligned engine.

The engine's configuration carries the name of the class (`worker_class.WORKER`) to every process. A process that cannot
import it fails to start, instead of running a stock worker. The public methods override vLLM's, except
`alignkit_epoch`, `alignkit_status` and `alignkit_weights`, which the front end calls by name, and `alignkit_verify`,
which the worker extensions of `integrations` call.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import vllm
from vllm.distributed import get_ep_group, get_tp_group
from vllm.logger import init_logger

from alignkit.dist import TP, symmetric
from alignkit.engines.hook_points import relies_on
from alignkit.errors import UnsupportedError
from alignkit.identity import sync
from alignkit.runtime import dispatch
from alignkit.runtime.families import on_host
from alignkit.runtime.ids import contract_id
from alignkit.vllm import epochs
from alignkit.vllm.built import architecture
from alignkit.vllm.fingerprint import Weights
from alignkit.vllm.layers import aligned_layers
from alignkit.vllm.live import Watch
from alignkit.vllm.parallel import register_groups
from alignkit.vllm.refuse import refuse_config
from alignkit.vllm.sampler import AlignedSampler
from alignkit.vllm.updates import Updates, stopping
from alignkit.vllm.versions import installed, resolve
from alignkit.vllm.warmup import warm_up

logger = init_logger("vllm.alignkit")  # vLLM configures logging only for loggers below its own name


@relies_on("v1/worker/cpu_worker.py:CPUWorker", members="init_device")
@relies_on("v1/worker/gpu_worker.py:Worker", members="init_device", when="cuda")
@relies_on(
    "v1/worker/gpu_worker.py:Worker",
    members="""
        load_model execute_model execute_dummy_batch compile_or_warm_up_model start_weight_update
        finish_weight_update sleep wake_up
    """,
)
@relies_on("v1/worker/worker_base.py:WorkerBase.apply_model", "fn")
@relies_on("v1/worker/gpu_worker.py:Worker.reload_weights", mentions="model_runner reload_weights")
@relies_on(
    "v1/worker/gpu_model_runner.py:GPUModelRunner.reload_weights", "weights_iterator weights_path is_checkpoint_format"
)
@relies_on("v1/worker/gpu_model_runner.py:Sampler", when="cuda")
@relies_on("config/vllm.py:VllmConfig", members="use_v2_model_runner")
class AlignedWorker(resolve(installed().worker)):
    def init_device(self) -> None:
        refuse_config(self.vllm_config)
        super().init_device()
        dispatch.backend_of(self.device)  # raises BackendError if the device has no backend
        register_groups(self._experts_shared)
        if self.vllm_config.use_v2_model_runner:  # the V2 runner creates its sampler in load_model
            return
        runner = self.model_runner
        if type(runner.sampler).__name__ != "Sampler":
            raise UnsupportedError(f"sampler: must be vLLM's Sampler, got a {type(runner.sampler).__name__}")
        runner.sampler = AlignedSampler(self.model_config.logprobs_mode, self.model_config.use_fp64_gumbel)

    def load_model(self, **kwargs) -> None:
        with aligned_layers(), self._sampling():
            super().load_model(**kwargs)
        self._watch = Watch(self.model_runner, self.vllm_config)
        self._epochs = epochs.of(self.vllm_config)
        self._arch = architecture(self.model_config)
        self._updates = Updates(self._arch, self._epochs, self._held)
        model = self.model_runner.get_model()
        model.load_weights = self._updates.watch(model.load_weights)
        self._weights = Weights(model, self._arch)
        # Ranks with different contracts or modules would still run collectives, with different bits.
        TP(self._ranks.cpu_group).check_same("vLLM worker", self._inspect)
        logger.info("aligned: contract %s", dispatch.family(self.device).contract_id)

    def compile_or_warm_up_model(self):
        if not on_host(self.device):
            warm_up(self.model_runner.get_model(), self.vllm_config, self._logprobs)
        with self._updates.warming_up():  # the V2 runner's warm-up executes steps
            times = super().compile_or_warm_up_model()
        self._watch.inspect()  # the model is now compiled and captured in CUDA graphs
        return times

    def execute_model(self, scheduler_output):
        with stopping(self._epochs):
            self._updates.step(scheduler_output)
            self._watch.step()
        return super().execute_model(scheduler_output)

    def execute_dummy_batch(self) -> None:
        self._updates.require_whole()
        self._watch.step()  # a dummy batch takes part in the expert parallelism of all replicas
        super().execute_dummy_batch()

    def apply_model(self, fn):
        with self._updates.failing("apply_model"):
            result = super().apply_model(fn)
        self._inspect_model()
        return result

    def reload_weights(self, weights_iterator=None, weights_path=None, is_checkpoint_format=True) -> None:
        if weights_path is not None:
            self._updates.check_files(weights_path)
        names: set[str] | None = None
        if weights_iterator is not None and is_checkpoint_format:
            names = set()
            weights_iterator = self._updates.counted(weights_iterator, names)
        with self._updates.changing("reload_weights"):
            super().reload_weights(
                weights_iterator=weights_iterator, weights_path=weights_path, is_checkpoint_format=is_checkpoint_format
            )
            if names is not None:
                self._updates.require_all(names)
            self._watch.inspect()

    def start_weight_update(self, *args, **kwargs) -> None:
        super().start_weight_update(*args, **kwargs)
        self._updates.begin("start_weight_update")

    def finish_weight_update(self) -> None:
        begun = self._epochs.problem is not None  # otherwise vLLM rejects the call, and has changed nothing
        with self._updates.failing("finish_weight_update") if begun else nullcontext():
            super().finish_weight_update()
            self._watch.inspect()
        self._updates.finish()

    def sleep(self, level: int = 1) -> None:
        super().sleep(level)
        if level == 2:
            self._updates.discarded()

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        if tags is None or "weights" in tags:
            self._inspect_model()

    def _logprobs(self, logits) -> None:
        if not self.vllm_config.use_v2_model_runner:
            AlignedSampler.compute_logprobs(logits)
            return
        from alignkit.vllm.sampler_v2 import token_logprobs

        for ids in (1, 2):  # the compiler specializes on 1
            token_logprobs(logits, torch.zeros(len(logits), ids, dtype=torch.int64, device=logits.device))

    def alignkit_epoch(self, epoch: int, mixed: bool, failed: str | None) -> tuple[str | None, str]:
        """Take the epoch of the next requests, and return why the weights are those of no model and the contract id.

        See `Updates.tell`. failed: a method of the worker, or a function.
        """
        if failed in vars(AlignedWorker) or not (failed is None or failed.endswith("()") or hasattr(self, failed)):
            failed = None  # its own methods note their failures, and an unknown method did not run
        return self._updates.tell(epoch, mixed, failed), contract_id(self.device)

    def alignkit_status(self) -> dict:
        """Return the current state of this worker: see `alignkit.vllm.worker_status`."""
        try:
            facts = self._inspect()
        except UnsupportedError as e:
            return {"patched": False, "replaced": str(e), "vllm": vllm.__version__, "epoch": self._updates.epoch}
        own = {"epoch": self._updates.epoch, "symmetric_memory": symmetric.used(self._ranks.device_group)}
        return {"patched": True, **facts, **own}

    def alignkit_weights(self) -> dict:
        """Return what this worker holds of each HF tensor: see `alignkit.vllm.fingerprint`."""
        return self._weights.parts()

    @relies_on("distributed/parallel_state.py:GroupCoordinator", members="is_last_rank")
    def alignkit_verify(self, trainer: bytes | None, error: Exception | None = None) -> None:
        """Require the engine's weights to be the trainer's after a weight sync, or reject steps. A collective.

        trainer: the fingerprint that came with this worker's weights, packed by `identity.sync`. error: the exception
        that ended this worker's sync, which fails the sync of all workers.
        """
        group = TP(self._ranks.cpu_group)

        def held() -> tuple:
            if error is not None:
                raise error
            return trainer, tuple(self.alignkit_weights().items())

        try:
            with self._updates.failing("weight sync"):
                answers = group.check("weight sync", held)
                sync.require_equal([(received, dict(items)) for received, items in answers], self._arch.hf_shapes())
        except Exception:
            # vLLM reads the workers' answers up to the first failure, and would take unread ones for answers to its
            # next call. So only the worker that it reads last fails the call. All workers reject steps.
            if get_tp_group().is_last_rank:
                raise
            logger.exception("weight sync")

    @relies_on("v1/worker/gpu_model_runner.py:GPUModelRunner.__init__", mentions="requests")
    @relies_on("v1/worker/gpu/states.py:RequestState.__init__", mentions="req_id_to_index", when="cuda")
    def _held(self) -> list[str]:
        """Return the requests whose KV cache this worker holds."""
        runner = self.model_runner
        return list(runner.req_states.req_id_to_index if self.vllm_config.use_v2_model_runner else runner.requests)

    @property
    def _experts_shared(self) -> bool:
        """True if data-parallel replicas share experts; replicas of a dense model share nothing."""
        return self.parallel_config.data_parallel_size > 1 and bool(self.model_config.is_moe)

    @property
    def _ranks(self):
        """The vLLM process group of all ranks that compute the model together."""
        return get_ep_group() if self._experts_shared else get_tp_group()

    def _sampling(self):
        if not self.vllm_config.use_v2_model_runner:
            return nullcontext()
        from alignkit.vllm.sampler_v2 import aligned_sampling

        return aligned_sampling()

    def _inspect_model(self) -> dict[str, int]:
        """Inspect the model; after a failed change of the weights, the error is the change's and not its effect's."""
        try:
            return self._watch.inspect()
        except UnsupportedError:
            self._updates.require_whole()
            raise

    def _inspect(self) -> dict:
        self._updates.require_whole()
        return {
            "contract": contract_id(self.device),
            "backend": dispatch.backend_of(self.device),
            "vllm": vllm.__version__,
            "modules": self._watch.inspect(),
        }
