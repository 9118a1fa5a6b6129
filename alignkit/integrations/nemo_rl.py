"""NeMo-RL integration: importing this module patches NeMo-RL in this process.

NeMo-RL has no plugins, but all its processes inherit the environment. So an environment variable enables alignkit:

    export PYTHONPATH=$(python -m alignkit.integrations.startup):$PYTHONPATH

Python then runs `startup/sitecustomize.py` in each process, which imports this module when NeMo-RL is imported. The
replaced and wrapped functions are in functions.json, and the replacements take the same arguments.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from types import SimpleNamespace

import torch

import alignkit
from alignkit.config import Config
from alignkit.errors import UnsupportedError
from alignkit.identity import sync
from alignkit.integrations.framework import Framework, require_engines
from alignkit.integrations.functions import require_tested

ENV = Config.vllm.name
TRANSPORTS = (None, "ipc", "nccl")
"""Values of `policy.generation.refit_transport` whose weight syncs are verified."""


class Patch(Framework):
    """Handle of the patch of NeMo-RL and Megatron-core in this process; `undo` restores both."""

    engine, command = "NeMo-RL", "alignkit.integrations.nemo_rl"

    def install(self) -> None:
        self.version = getattr(sys.modules.get("nemo_rl"), "__version__", "unknown")
        self._env = os.environ.get(ENV)
        os.environ[ENV] = "1"  # for alignkit's plugin in vLLM workers, which inherit it through Ray
        self.begin(
            {
                "nemo_rl.distributed.model_utils": self._logprobs,
                "nemo_rl.models.megatron.train": self._temperature,
                "nemo_rl.models.megatron.setup": self._models,
                "nemo_rl.models.policy.workers.megatron_policy_worker": self._policy,
                "nemo_rl.models.generation.vllm.vllm_backend": self._rollout,
                "nemo_rl.models.generation.vllm": lambda module: require_engines(),  # in the trainer too
            }
        )

    def restored(self) -> None:
        super().restored()
        if "_env" in vars(self):
            if self._env is None:
                os.environ.pop(ENV, None)
            else:
                os.environ[ENV] = self._env

    def _logprobs(self, module) -> None:
        plain, chunked = module.DistributedLogprob, module.ChunkedDistributedLogprob
        require_tested("NeMo-RL", plain.forward, chunked.forward)
        self.replace(module, "DistributedLogprob", SimpleNamespace(apply=logprob))
        self.replace(module, "ChunkedDistributedLogprob", SimpleNamespace(apply=chunked_logprob))
        for name in ("DistributedLogprobWithSampling", "ChunkedDistributedLogprobWithSampling"):
            self.replace(module, name, SimpleNamespace(apply=refuse_sampling))

    def _temperature(self, module) -> None:
        require_tested("NeMo-RL", module.apply_temperature_scaling)
        self.replace(module, "apply_temperature_scaling", scaled)

    def _models(self, module) -> None:
        from alignkit.megatron.patch import Patch as Megatron

        self.align(Megatron, alignkit.patch_megatron)
        self.replace(module, "setup_model_and_optimizer", with_vocabulary(module.setup_model_and_optimizer))

    def _policy(self, module) -> None:
        worker = module.MegatronPolicyWorkerImpl
        stock = worker._iter_params_with_optional_kv_scales
        senders = worker.prepare_refit_info, worker.stream_weights_via_ipc_zmq, worker.broadcast_weights_for_collective
        require_tested("NeMo-RL", stock, *map(undecorated, senders))
        self.replace(worker, "_iter_params_with_optional_kv_scales", with_fingerprint(stock))

    def _rollout(self, module) -> None:
        worker = module.VllmInternalWorkerExtension
        load, lifecycle = worker._load_weights, worker._weight_update_lifecycle
        receivers = worker.update_weights_via_ipc_zmq, worker.update_weights_from_collective
        require_tested("NeMo-RL", load, lifecycle, *map(undecorated, receivers))
        self.replace(worker, "_load_weights", without_fingerprint(load))
        self.replace(worker, "_weight_update_lifecycle", verified(lifecycle))
        other = module.VllmInternalWorkerExtensionWithCheckpointEngine
        for cls, name in (
            (worker, "nccl_reshard_refit"),
            (worker, "update_weights_from_decoded_sparse_payload"),
            (other, "update_weights_from_checkpoint_engine"),
        ):
            self.replace(cls, name, refuse_transport)


def logprob(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, group, inference_only=False):
    """Replace ``DistributedLogprob.apply``: fp32 logits ``[b, s, V / tp]`` of an aligned model, target ``[b, s]``."""
    from megatron.core.tensor_parallel import cross_entropy

    from alignkit.megatron.patch import active

    active()
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        return -cross_entropy._VocabParallelCrossEntropy.apply(vocab_parallel_logits, target, 0.0, group)


def chunked_logprob(
    vocab_parallel_logits, target, vocab_start_index, vocab_end_index, chunk_size, tp_group, inference_only=False
):
    """Replace ``ChunkedDistributedLogprob.apply``. The op bounds its workspace itself; chunks do not affect bits."""
    return logprob(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, tp_group, inference_only)


def refuse_sampling(*args, **kwargs):
    raise UnsupportedError(
        "policy.generation.top_k, policy.generation.top_p: must be null and 1.0, because training recomputes logprobs "
        "from the tokens alone"
    )


def scaled(logits: torch.Tensor, sampling_params):
    """Replace ``apply_temperature_scaling``: divide by a tensor; a GPU multiplies by a float's reciprocal."""
    if sampling_params is not None and sampling_params.temperature != 1.0:
        logits.div_(torch.tensor(sampling_params.temperature, dtype=torch.float32, device=logits.device))
    return logits


def with_vocabulary(stock):
    """Wrap ``setup_model_and_optimizer`` to set the model's vocabulary size to that of config.json, as in vLLM."""

    @functools.wraps(stock)
    def setup(policy_cfg, megatron_cfg, *args, **kwargs):
        from alignkit.megatron import set_vocab_size

        state = stock(policy_cfg, megatron_cfg, *args, **kwargs)
        if state.draft_model is not None:
            raise UnsupportedError(
                "policy.draft.enabled: must be False, because speculative decoding is not supported, got True"
            )
        set_vocab_size(state.model, int(megatron_cfg.model.vocab_size))
        return state

    return setup


def undecorated(function):
    """Return the function that NeMo-RL's `wrap_with_nvtx_name` decorates, or `function`."""
    function = inspect.unwrap(function)
    return inspect.getclosurevars(function).nonlocals.get("func", function)


def with_fingerprint(stock):
    """Wrap `_iter_params_with_optional_kv_scales`, the stream of weight syncs, to end with the model's fingerprint."""

    @functools.wraps(stock)
    def export(worker, *args, **kwargs):
        from alignkit.megatron.fingerprint import append_fingerprint

        if (worker.cfg.get("generation") or {}).get("refit_transport") not in TRANSPORTS:
            refuse_transport()
        return append_fingerprint(stock(worker, *args, **kwargs), [worker.model], worker.cfg["model_name"])

    return export


def without_fingerprint(stock):
    """Wrap `VllmInternalWorkerExtension._load_weights` to take the trainer's fingerprint from the weights."""

    @functools.wraps(stock)
    def load(worker, weights) -> None:
        weights, trainer = sync.take(weights)
        worker._alignkit_trainer = trainer or getattr(worker, "_alignkit_trainer", None)
        stock(worker, weights)

    return load


def verified(stock):
    """Wrap `VllmInternalWorkerExtension._weight_update_lifecycle` to require the trainer's weights at its end."""

    @functools.wraps(stock)
    @contextlib.contextmanager
    def lifecycle(worker, transport):
        worker._alignkit_trainer = error = None
        try:
            with stock(worker, transport) as finalize:
                yield finalize
        except Exception as e:
            error = e
        worker.alignkit_verify(worker._alignkit_trainer, error)

    return lifecycle


def refuse_transport(*args, **kwargs):
    raise UnsupportedError(
        "policy.generation.refit_transport: must be null, because other transports send parts of the weights, which "
        "alignkit does not compare with the trainer's"
    )


Patch.apply()
