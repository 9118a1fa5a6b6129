"""`patch_vllm()`: engines created after the call are aligned, in every process that they run in.

The patch itself is small. It validates an engine's configuration and sets alignkit's worker class in it. The worker,
in the process where it starts, builds the model from alignkit's layers and verifies the result. vLLM's layer classes
do not change globally, so an engine stays aligned or stock, as created, for its lifetime. Public: docs/api/vllm.md
documents `patch_vllm`, `Patch`, `status` and `worker_status` with the keys of their results.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Awaitable
from importlib.util import find_spec
from typing import Any

from alignkit.config import Config
from alignkit.engines import patch as engine_patch
from alignkit.engines.hook_points import relies_on
from alignkit.errors import UnsupportedError
from alignkit.vllm import epochs
from alignkit.vllm.epochs import token_epochs  # noqa: F401 - public here
from alignkit.vllm.policy import fusions
from alignkit.vllm.refuse import refuse_config
from alignkit.vllm.versions import installed, runs_elsewhere
from alignkit.vllm.worker_class import CONTRACT_KEY, is_aligned, worker_class

ENV = Config.vllm.name
"""Environment variable, set to 1 while patched, so that processes started meanwhile patch themselves."""
OPT_IN_PASSES = frozenset({"enable_sp", "fuse_gemm_comms"})
"""Compiler passes that vLLM enables only on request; optimization levels enable the others by default."""


class Patch(engine_patch.Patch):
    """Handle of the live patch of vLLM; also a context manager.

    Engines created after `undo()` are stock. Engines created before it stay aligned.
    """

    engine, command = "vLLM", "patch_vllm"

    def install(self) -> None:
        if find_spec("vllm") is None:
            raise UnsupportedError("patch_vllm: vLLM is not installed. Install a supported version (docs/vllm.md)")
        import vllm

        self.version = vllm.__version__
        installed()

        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine import async_llm, core_client, llm_engine
        from vllm.v1.engine.input_processor import InputProcessor

        from alignkit.vllm import client
        from alignkit.vllm.frontend import AlignedInputProcessor, AlignedOutputProcessor, refuse_stock

        for owner, name, new in (
            *((core_client, name, client.aligned(getattr(core_client, name))) for name in client.CLIENTS),
            (EngineArgs, "create_engine_config", _aligned_config(EngineArgs.create_engine_config)),
            (llm_engine, "InputProcessor", AlignedInputProcessor),
            (async_llm, "InputProcessor", AlignedInputProcessor),
            (InputProcessor, "_validate_params", refuse_stock(InputProcessor._validate_params)),
            (llm_engine.LLMEngine, "__init__", client.counting(llm_engine.LLMEngine.__init__)),
            (async_llm.AsyncLLM, "__init__", client.counting(async_llm.AsyncLLM.__init__)),
            (llm_engine, "OutputProcessor", AlignedOutputProcessor),
            (async_llm, "OutputProcessor", AlignedOutputProcessor),
        ):
            self.replace(owner, name, new)
        self._env = os.environ.get(ENV)
        os.environ[ENV] = "1"

    def restored(self) -> None:
        if "_env" in vars(self) and os.environ.get(ENV) == "1":  # unchanged since the patch set it
            if self._env is None:
                del os.environ[ENV]
            else:
                os.environ[ENV] = self._env

    def facts(self) -> dict[str, Any]:
        return {"contract": None if runs_elsewhere() else installed().family.contract_id}


def patch_vllm() -> Patch:
    """Align the vLLM engines that are created between this call and the handle's `undo()`.

    Engines created before the call reject requests until the undo. An engine or a request that uses an unsupported
    feature raises UnsupportedError with the feature's name.

    Returns:
        The handle of the patch, also a context manager. A second call returns the live handle.

    Raises:
        UnsupportedError: If vLLM is not installed, or alignkit does not support its version.
    """
    return Patch.apply()


def status() -> dict[str, Any]:
    """Return the state of the patch in this process.

    Returns:
        A dict with key `patched`; while patched also `version` (of vLLM), `contract` and `names` (the replaced names).
        `contract` is None in a process that sees no GPU although vLLM is built for GPUs.
    """
    return Patch.status()


def worker_status(llm) -> list[dict] | Awaitable[list[dict]]:
    """Return the state of each worker of a running engine, in rank order.

    Args:
        llm: A `vllm.LLM`, an `LLMEngine` or an `AsyncLLM`. For an `AsyncLLM`, await the result.

    Returns:
        A dict per worker with key `patched`. If True, also `contract`, `backend`, `vllm` (the version), `modules` (the
        number per aligned class), `symmetric_memory` (whether sums over ranks use it), `epoch` (the number of changes
        of the weights) and `weights` (the digest of their fingerprint if it was computed in this epoch, else None). If
        False because a part of the engine was replaced or an update failed, also `replaced`, a message with the
        reason, `vllm`, `epoch` and `weights` (None).
    """
    engine = getattr(llm, "llm_engine", llm)
    parallel = engine.vllm_config.parallel_config
    aligned, stock = is_aligned(engine.vllm_config), [{"patched": False}] * parallel.world_size

    def known(workers: list[dict]) -> list[dict]:
        digests = epochs.of(engine.vllm_config).weights
        return [w | {"weights": digests.get(w["epoch"]) if w["patched"] else None} for w in workers]

    if not inspect.iscoroutinefunction(engine.collective_rpc):
        return known(engine.collective_rpc("alignkit_status")) if aligned else stock

    async def ask() -> list[dict]:
        return known(await engine.collective_rpc("alignkit_status")) if aligned else stock

    return ask()


@relies_on("engine/arg_utils.py:EngineArgs", members="create_engine_config")
@relies_on("config/parallel.py:ParallelConfig", members="worker_cls")
@relies_on("config/vllm.py:VllmConfig", members="attention_config additional_config")
@relies_on("config/compilation.py:CompilationConfig", members="pass_config")
@relies_on("config/compilation.py:PassConfig", members="fuse_allreduce_rms fuse_norm_quant fuse_act_quant")
@relies_on("config/compilation.py:PassConfig", members="enable_sp fuse_gemm_comms", when="opt_in_passes")
@relies_on("config/attention.py:AttentionConfig", members="backend")
@relies_on("v1/attention/backends/registry.py:AttentionBackendEnum", members="CPU_ATTN", when="cpu")
@relies_on("v1/attention/backends/registry.py:AttentionBackendEnum", members="CUSTOM", when="cuda")
def _aligned_config(create_engine_config):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    version = installed()

    @functools.wraps(create_engine_config)
    def create(self, *args, **kwargs):
        worker = worker_class(self.worker_cls, version.worker.replace(":", "."))
        config = create_engine_config(self, *args, **kwargs)
        passes = config.compilation_config.pass_config
        for fusion in set(fusions(passes)) - OPT_IN_PASSES:  # aligned models have no ops to fuse
            setattr(passes, fusion, False)
        refuse_config(config)
        config.parallel_config.worker_cls = worker
        config.attention_config.backend = AttentionBackendEnum[version.attention]
        # vLLM caches compiled models by a hash of the configuration. The contract id separates aligned from stock ones.
        config.additional_config = {**config.additional_config, CONTRACT_KEY: version.family.contract_id}
        return config

    return create
