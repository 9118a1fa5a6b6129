"""`patch_vllm()`: engines made after it are aligned, in every process they run in.

The patch itself is small. An engine's configuration is checked and given alignkit's worker; the worker, in
whatever process it starts, builds the model out of alignkit's layers and verifies what it built. Nothing
global changes in vLLM's layers, so an engine keeps what it was made with, patched or stock, for its life.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Awaitable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from alignkit.config import Config
from alignkit.engines import patch as engine_patch
from alignkit.errors import UnsupportedError
from alignkit.vllm.policy import fusions
from alignkit.vllm.refuse import refuse_config
from alignkit.vllm.versions import VERSIONS, installed
from alignkit.vllm.worker_class import MADE, is_aligned, worker_class

ENV = Config.vllm.name
"""Set to 1 while patched, so that processes started meanwhile patch themselves."""
ASKED_FOR = frozenset({"enable_sp", "fuse_gemm_comms"})
"""Compiler passes that vLLM turns on for those only who ask for them; others are defaults of its optimization levels."""


class Patch(engine_patch.Patch):
    """Handle of a live patch; also a context manager. After its undo engines made from then on are stock again; those
    made before stay aligned."""

    engine, command = "vLLM", "patch_vllm"

    def install(self) -> None:
        if find_spec("vllm") is None:
            raise UnsupportedError("vLLM is not installed")
        import vllm

        self.version = vllm.__version__
        VERSIONS.require(self.version)
        VERSIONS.require_seams(Path(vllm.__file__).parent, self.version)

        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine import async_llm, llm_engine
        from vllm.v1.engine.input_processor import InputProcessor

        from alignkit.vllm.frontend import AlignedInputProcessor, refuse_stock

        for owner, name, new in (
            (EngineArgs, "create_engine_config", _aligned_config(EngineArgs.create_engine_config)),
            (llm_engine, "InputProcessor", AlignedInputProcessor),
            (async_llm, "InputProcessor", AlignedInputProcessor),
            (InputProcessor, "_validate_params", refuse_stock(InputProcessor._validate_params)),
        ):
            self.replace(owner, name, new)
        self._env = os.environ.get(ENV)
        os.environ[ENV] = "1"

    def restored(self) -> None:
        if "_env" in vars(self) and os.environ.get(ENV) == "1":  # as it was set here
            if self._env is None:
                del os.environ[ENV]
            else:
                os.environ[ENV] = self._env

    def facts(self) -> dict[str, Any]:
        return {"contract": installed().family.contract_id}


def patch_vllm() -> Patch:
    """Aligns the vLLM engines that are made after this call and before the handle's `undo()`.

    Patched again, it returns the live handle. An engine made before is refused requests until the undo.
    Features that cannot be kept aligned are refused, by name, when an engine or a request asks for them.
    Raises UnsupportedError if vLLM is absent or of a version that alignkit does not run on.
    """
    return Patch.apply()


def status() -> dict[str, Any]:
    """What is patched in this process. Keys: patched, and if so version (of vLLM), contract, and names (that are
    replaced)."""
    return Patch.status()


def worker_status(llm) -> list[dict] | Awaitable[list[dict]]:
    """What each worker of a running `vllm.LLM` (or `LLMEngine`) computes with, in rank order: `patched`, and
    if so `contract`, `backend`, `vllm`, the number of `modules` by aligned class, and whether sums over ranks go through
    `symmetric_memory`. Of an `AsyncLLM`, to be awaited."""
    engine = getattr(llm, "llm_engine", llm)
    parallel = engine.vllm_config.parallel_config
    aligned, stock = is_aligned(engine.vllm_config), [{"patched": False}] * parallel.world_size
    if not inspect.iscoroutinefunction(engine.collective_rpc):
        return engine.collective_rpc("alignkit_status") if aligned else stock

    async def ask() -> list[dict]:
        return await engine.collective_rpc("alignkit_status") if aligned else stock

    return ask()


def _aligned_config(create_engine_config):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    version = installed()

    @functools.wraps(create_engine_config)
    def create(self, *args, **kwargs):
        worker = worker_class(self.worker_cls, version.worker.replace(":", "."))
        config = create_engine_config(self, *args, **kwargs)
        passes = config.compilation_config.pass_config
        for fusion in set(fusions(passes)) - ASKED_FOR:  # there is nothing left that they would fuse
            setattr(passes, fusion, False)
        refuse_config(config)
        config.parallel_config.worker_cls = worker
        config.attention_config.backend = AttentionBackendEnum[version.attention]
        # vLLM keeps compiled models on disk by a hash of the configuration: aligned and stock ones must not meet.
        config.additional_config = {**config.additional_config, MADE: version.family.contract_id}
        return config

    return create
