"""verl integration: importing this module patches verl in this process.

One setting in the recipe enables alignkit:

    actor_rollout_ref.model.external_lib=alignkit.integrations.verl

verl imports the module named by `external_lib` in every process that creates the model's configuration: the trainer,
each training worker and each rollout server. This happens before an engine is built, and verl propagates exceptions.

A verl function that is replaced needs its hash in functions.json; one that is wrapped or relied on needs a hook point.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

import alignkit
from alignkit import ops
from alignkit.dist import TP
from alignkit.engines.hook_points import HookPoint, unresolved
from alignkit.errors import UnsupportedError
from alignkit.integrations.framework import Framework, require_engines
from alignkit.integrations.functions import require_tested
from alignkit.integrations.recipe import check

ENGINE = "verl.workers.engine.megatron.transformer_impl"
FUSED = "verl.models.mcore.model_forward_fused"
SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
"""verl's modules that `Patch` changes when they are imported."""
EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"
"""Name of verl's worker extension; `ALIGNED_EXTENSION` derives from it."""
ALIGNED_EXTENSION = "alignkit.integrations.verl_worker.WorkerExtension"
TEMPERATURE_OF_PADDING = 1e-8
"""Temperature of padding tokens, for which verl passes 0. It equals verl's clamp and affects no token in the loss."""

_WORKER = "workers/rollout/vllm_rollout/utils.py"
_SERVER = "workers/rollout/vllm_rollout/vllm_async_server.py"
HOOK_POINTS = (
    HookPoint(
        "workers/config/model.py", "HFModelConfig.__post_init__", mentions=("import_external_libs", "external_lib")
    ),
    HookPoint("workers/engine/base.py", "EngineRegistry.new", ("model_type", "backend")),
    HookPoint("workers/engine/megatron/transformer_impl.py", "MegatronEngine._build_megatron_module"),
    HookPoint(
        "workers/engine/megatron/transformer_impl.py",
        "MegatronEngine.get_per_tensor_param",
        mentions=("load_megatron_model_to_gpu", "per_tensor_param", "peft_config"),
    ),
    HookPoint(
        _WORKER,
        "vLLMColocateWorkerExtension.update_weights_from_ipc",
        mentions=("receive_weights", "_update_weights", "process_weights_after_loading"),
    ),
    HookPoint(_WORKER, "vLLMColocateWorkerExtension._update_weights", ("weights",)),
    HookPoint(_WORKER, "vLLMColocateWorkerExtension.update_verl_delta_weights", ("update_info",)),
    HookPoint(
        "workers/rollout/vllm_rollout/vllm_rollout.py",
        "ServerAdapter.update_weights",
        mentions=("_execute_method", "async_send_weights", "_update_delta_weights"),
    ),
    HookPoint(
        _SERVER, "vLLMHttpServer.launch_server", mentions=("_preprocess_engine_kwargs", "_get_worker_extension_cls")
    ),
    HookPoint(_SERVER, "vLLMHttpServer.run_server", mentions=("AsyncEngineArgs", "create_engine_config", "tokenizer")),
    HookPoint(_SERVER, "vLLMHttpServer._preprocess_engine_kwargs", ("engine_kwargs",)),
    HookPoint("trainer/ppo/v1/trainer_base.py", "PPOTrainer._setup", mentions=("_init_tokenizer", "_init_dataloader")),
    HookPoint("trainer/ppo/ray_trainer.py", "RayPPOTrainer.init_workers"),
)
"""Names in verl that are wrapped or relied on. `functions` holds the hashes of replaced functions."""


class Patch(Framework):
    """Handle of the patch of verl and both engines in this process; `undo` restores all."""

    engine, command = "verl", "alignkit.integrations.verl"

    def install(self) -> None:
        import verl

        self.version = verl.__version__  # pyright: ignore[reportAttributeAccessIssue]
        if missing := unresolved(Path(verl.__file__).parent, HOOK_POINTS):
            raise UnsupportedError(
                f"verl {self.version}: not supported. These functions, which alignkit replaces or relies on, are "
                f"missing or have changed: {'; '.join(missing)}. Install a supported version (docs/verl.md)"
            )
        self.begin(
            {
                "verl.workers.engine.base": self._registry,
                ENGINE: self._training,
                FUSED: self._fused,
                SERVER: self._server,
                "verl.trainer.ppo.v1.trainer_base": lambda m: self._trainer(m.PPOTrainer, "_init_dataloader"),
                "verl.trainer.ppo.ray_trainer": lambda m: self._trainer(m.RayPPOTrainer, "init_workers"),
            }
        )

    def _registry(self, base) -> None:
        self.replace(base.EngineRegistry, "new", classmethod(only_megatron(vars(base.EngineRegistry)["new"].__func__)))

    def _training(self, engine) -> None:
        from alignkit.megatron.patch import Patch as Megatron

        self.align(Megatron, alignkit.patch_megatron)
        stock = engine.MegatronEngineWithLMHead._lm_head_logits_processor
        require_tested("verl", stock)
        self.replace(engine.MegatronEngineWithLMHead, "_lm_head_logits_processor", logits_processor)
        self.replace(
            engine.MegatronEngine,
            "_build_megatron_module",
            with_vocabulary(engine.MegatronEngine._build_megatron_module),
        )
        self.replace(
            engine.MegatronEngine, "get_per_tensor_param", with_fingerprint(engine.MegatronEngine.get_per_tensor_param)
        )

    def _fused(self, module) -> None:
        from alignkit.megatron import output_processor

        require_tested("verl", module.fused_output_processor)
        self.replace(module, "fused_output_processor", output_processor)

    def _server(self, module) -> None:
        from alignkit.vllm.patch import Patch as VLLM

        self.align(VLLM, alignkit.patch_vllm)
        # Ray derives a class from an actor's class, whose methods call the originals. Patch the subclasses too.
        for cls in (module.vLLMHttpServer, *_subclasses(module.vLLMHttpServer)):
            for name, wrapped in (
                ("_preprocess_engine_kwargs", with_vocabulary_size),
                ("_get_worker_extension_cls", worker_extension),
            ):
                if name in vars(cls):
                    self.replace(cls, name, wrapped(vars(cls)[name]))

    def _trainer(self, trainer: type, name: str) -> None:
        stock = getattr(trainer, name)

        @functools.wraps(stock)
        def checked(self, *args, **kwargs):
            from omegaconf import OmegaConf

            config: Any = OmegaConf.to_container(self.config, resolve=True)
            check("verl", config)
            require_engines()
            return stock(self, *args, **kwargs)

        self.replace(trainer, name, checked)


def _subclasses(cls: type) -> list[type]:
    """Return all direct and indirect subclasses of a class."""
    return [c for direct in cls.__subclasses__() for c in (direct, *_subclasses(direct))]


def vocabulary_size(model_config: Any) -> int:
    """Return the vocabulary size in verl, the number of ids of the tokenizer."""
    if model_config.tokenizer is None:
        raise UnsupportedError(
            "actor_rollout_ref.model.load_tokenizer: must be True, because the tokenizer determines the vocabulary "
            "size, got False"
        )
    return min(len(model_config.tokenizer), model_config.hf_config.vocab_size)


def only_megatron(stock):
    @functools.wraps(stock)
    def new(cls, model_type, backend, *args, **kwargs):
        if model_type == "language_model" and backend != "megatron":
            raise UnsupportedError(f"strategy: must be 'megatron', got {backend!r}. Set model_engine=megatron")
        return stock(cls, model_type, backend, *args, **kwargs)

    return new


def with_vocabulary(stock):
    """Wrap `MegatronEngine._build_megatron_module` to set the vocabulary size of the models."""

    @functools.wraps(stock)
    def build(engine):
        from alignkit.megatron import set_vocab_size

        module = stock(engine)
        for chunk in module:
            set_vocab_size(chunk, vocabulary_size(engine.model_config))
        return module

    return build


def with_fingerprint(stock):
    """Wrap `MegatronEngine.get_per_tensor_param` to send the model's fingerprint, which `verl_worker` compares."""

    @functools.wraps(stock)
    def export(engine, *args, **kwargs):
        from alignkit.megatron.fingerprint import append_fingerprint

        weights, peft_config = stock(engine, *args, **kwargs)
        if peft_config is not None:
            raise UnsupportedError("actor_rollout_ref.model.lora: must be off, got adapters to send to the rollout")
        return append_fingerprint(weights, engine.module, engine.model_config.local_hf_config_path), None

    return export


def logits_processor(
    self,
    logits: torch.Tensor,
    label: torch.Tensor,
    temperature: torch.Tensor,
    *,
    calculate_sum_pi_squared: bool,
    calculate_entropy: bool,
    distillation_use_topk: bool,
    distillation_only: bool,
    logits_processor_func: Any,
    batch: Any,
    data_format: str,
) -> dict[str, torch.Tensor]:
    """Replace verl's `_lm_head_logits_processor`: compute the labels' log_probs, and the entropy, in one op.

    logits: fp32 ``[b, s, V / tp]`` of the aligned output layer, not modified. label, temperature: ``[b, s]``.
    """
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    for setting, asked in (
        (
            "algorithm.adv_estimator: must be an estimator without calculate_sum_pi_squared (docs/verl.md lists them)",
            calculate_sum_pi_squared,
        ),
        ("distillation.enabled: must be False, got distillation with distillation_use_topk", distillation_use_topk),
        ("distillation.enabled: must be False, got distillation with distillation_only", distillation_only),
    ):
        if asked:
            raise UnsupportedError(f"{setting}. alignkit computes only the logprobs of labels and the entropy")
    if logits.dtype != torch.float32:
        raise UnsupportedError(f"logits: must be torch.float32 from the aligned output layer, got {logits.dtype}")
    tp = TP(get_tensor_model_parallel_group())
    result = ops.logp_from_logits(
        logits,
        label,
        temperature=torch.where(temperature > 0, temperature, TEMPERATURE_OF_PADDING),
        vocab_size=vocabulary_size(self.model_config),
        vocab_start=tp.rank * logits.shape[-1],
        tp=tp,
        return_entropy=calculate_entropy,
    )
    return dict(zip(("log_probs", "entropy"), result, strict=True)) if calculate_entropy else {"log_probs": result}


def with_vocabulary_size(stock):
    """Wrap `vLLMHttpServer._preprocess_engine_kwargs` to pass the vocabulary size to vLLM."""

    @functools.wraps(stock)
    def preprocess(server, engine_kwargs: dict) -> None:
        from alignkit.vllm.policy import VOCAB_SIZE

        stock(server, engine_kwargs)
        given = engine_kwargs.get("additional_config") or {}
        given = json.loads(given) if isinstance(given, str) else dict(given)
        engine_kwargs["additional_config"] = given | {VOCAB_SIZE: vocabulary_size(server.model_config)}

    return preprocess


def worker_extension(stock):
    """Wrap `vLLMHttpServer._get_worker_extension_cls` to return alignkit's subclass of verl's extension."""

    @functools.wraps(stock)
    def name(server) -> str:
        if (asked := stock(server)) not in (EXTENSION, ALIGNED_EXTENSION):
            raise UnsupportedError(
                f"{type(server).__name__}._get_worker_extension_cls: must return verl's extension, {EXTENSION}, got "
                f"{asked}"
            )
        return ALIGNED_EXTENSION

    return name


Patch.apply()
