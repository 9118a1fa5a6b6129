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
from typing import Any, NamedTuple

from alignkit.contract import contract_id
from alignkit.errors import UnsupportedError
from alignkit.vllm.plugin import ENV
from alignkit.vllm.refuse import fusions, refuse_config
from alignkit.vllm.seams import installed, require_seams, require_version

WORKER = "alignkit.vllm.worker.AlignedWorker"
ASKED_FOR = frozenset({"enable_sp", "fuse_gemm_comms"})
"""Compiler passes that vLLM turns on for those only who ask for them; others are defaults of its optimization levels."""

_live: Patch | None = None


class Patch:
    """Handle of a live patch; also a context manager."""

    def __init__(self) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine import async_llm, llm_engine
        from vllm.v1.engine.input_processor import InputProcessor

        from alignkit.vllm.frontend import AlignedInputProcessor, refuse_stock

        self._env = os.environ.get(ENV)
        self._replaced: list[_Replaced] = []
        try:
            for owner, name, ours in (
                (EngineArgs, "create_engine_config", _aligned_config(EngineArgs.create_engine_config)),
                (llm_engine, "InputProcessor", AlignedInputProcessor),
                (async_llm, "InputProcessor", AlignedInputProcessor),
                (InputProcessor, "_validate_params", refuse_stock(InputProcessor._validate_params)),
            ):
                stock = getattr(owner, name)
                setattr(owner, name, ours)
                self._replaced.append(_Replaced(owner, name, stock, ours))
        except BaseException:
            self._restore()
            raise
        os.environ[ENV] = "1"

    @property
    def points(self) -> list[str]:
        """The names in vLLM that are replaced."""
        return [str(replaced) for replaced in self._replaced]

    def undo(self) -> None:
        """Engines made from now on are stock again; those made before stay aligned. Safe to call twice.

        Raises UnsupportedError, and changes nothing, if someone else has replaced one of the names since.
        """
        global _live
        foreign = [str(replaced) for replaced in self._replaced if not replaced.is_ours()]
        if foreign:
            raise UnsupportedError(
                f"undo: {', '.join(foreign)} was replaced by someone else since patch_vllm(): undo that first"
            )
        self._restore()
        if _live is self:
            _live = None
            if os.environ.get(ENV) == "1":  # as it was set here
                if self._env is None:
                    del os.environ[ENV]
                else:
                    os.environ[ENV] = self._env

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exc) -> None:
        self.undo()

    def _restore(self) -> None:
        while self._replaced:
            replaced = self._replaced.pop()
            setattr(replaced.owner, replaced.name, replaced.stock)


class _Replaced(NamedTuple):
    owner: Any
    name: str
    stock: Any
    ours: Any

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__qualname__', self.owner.__name__)}.{self.name}"

    def is_ours(self) -> bool:
        return getattr(self.owner, self.name, None) is self.ours


def patch_vllm() -> Patch:
    """Aligns the vLLM engines that are made after this call and before the handle's `undo()`.

    Patched again, it returns the live handle. An engine made before is refused requests until the undo.
    Features that cannot be kept aligned are refused, by name, when an engine or a request asks for them.
    Raises UnsupportedError if vLLM is absent or of a version that alignkit does not run on.
    """
    global _live
    if _live is None:
        if find_spec("vllm") is None:
            raise UnsupportedError("vLLM is not installed")
        import vllm

        require_version(vllm.__version__)
        require_seams(Path(vllm.__file__).parent, vllm.__version__)
        _live = Patch()
    return _live


def status() -> dict:
    """What is patched in this process: `patched`, `contract`, and the replaced names in `points`."""
    return {
        "patched": _live is not None,
        "contract": contract_id(installed().family) if _live else "stock",
        "points": _live.points if _live else [],
    }


def worker_status(llm) -> list[dict] | Awaitable[list[dict]]:
    """What each worker of a running `vllm.LLM` (or `LLMEngine`) computes with, in rank order: `patched`, and
    if so `contract`, `backend`, `vllm`, the number of `modules` by aligned class, and whether sums over ranks go through
    `symmetric_memory`. Of an `AsyncLLM`, to be awaited."""
    engine = getattr(llm, "llm_engine", llm)
    parallel = engine.vllm_config.parallel_config
    stock = [{"patched": False}] * parallel.world_size
    if not inspect.iscoroutinefunction(engine.collective_rpc):
        return stock if parallel.worker_cls != WORKER else engine.collective_rpc("alignkit_status")

    async def ask() -> list[dict]:
        return stock if parallel.worker_cls != WORKER else await engine.collective_rpc("alignkit_status")

    return ask()


def _aligned_config(create_engine_config):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    version = installed()

    @functools.wraps(create_engine_config)
    def create(self, *args, **kwargs):
        if self.worker_cls not in ("auto", version.worker.replace(":", ".")):
            raise UnsupportedError(f"worker_cls {self.worker_cls}: alignkit brings its own")
        config = create_engine_config(self, *args, **kwargs)
        passes = config.compilation_config.pass_config
        for fusion in set(fusions(passes)) - ASKED_FOR:  # there is nothing left that they would fuse
            setattr(passes, fusion, False)
        refuse_config(config)
        config.parallel_config.worker_cls = WORKER
        config.attention_config.backend = AttentionBackendEnum[version.attention]
        # vLLM keeps compiled models on disk by a hash of the configuration: aligned and stock ones must not meet.
        config.additional_config = {**config.additional_config, "alignkit": contract_id(version.family)}
        return config

    return create
