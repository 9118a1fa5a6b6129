"""Concurrent starts of vLLM engines on GPUs, one process per engine.

`test_cuda.py`, `test_experts_cuda.py` and `test_replicas_cuda.py` start their engines here;
`test_concurrent_engines.py` tests the starts without a GPU. The processes unpickle `start` by its name.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor

from tests.vllm.settings import ENGINE


class ConcurrentEngines:
    """Processes by key, each with a patched engine."""

    def __init__(self, started, ready):
        self._started, self._ready = started, ready

    def __getitem__(self, key):
        """Wait for this engine's start alone; return its process, or raise its startup error."""
        self._ready[key].result()
        return self._started[key]


@contextlib.contextmanager
def concurrent_engines(vllm_process, engines, cache, at_once=None):
    """Yield a `ConcurrentEngines` of engines that start concurrently.

    Args:
        vllm_process: Function that starts a `VllmProcess`.
        engines: Tuples (environment, model, engine options) by key, in starting order.
        cache: Root of vLLM's caches.
        at_once: Largest number of concurrent starts.
    """
    common = {
        "TORCHDYNAMO_DISABLE": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CACHE_ROOT": str(cache),
        "HF_HUB_OFFLINE": "1",
    }
    started = {key: vllm_process(**common | environment) for key, (environment, _, _) in engines.items()}
    pool = ThreadPoolExecutor(at_once)
    try:
        ready = {key: pool.submit(started[key], start, model, options) for key, (_, model, options) in engines.items()}
        yield ConcurrentEngines(started, ready)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def start(state, model, options):
    """Patch vLLM and start an engine in this process, with `options` beside those of all GPU tests."""
    from vllm import LLM

    from alignkit.jobs.replicas import Replicas
    from alignkit.jobs.rollout import shared_gpus
    from alignkit.vllm import patch_vllm

    patch_vllm()
    options = (
        ENGINE
        | {
            "enforce_eager": False,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 2048,
            "block_size": 16,
            "gpu_memory_utilization": 0.1,
        }
        | options
    )
    replicas = options.get("data_parallel_size", 1)
    options |= shared_gpus(replicas * options.get("tensor_parallel_size", 1))
    state.llm = (Replicas if replicas > 1 else LLM)(model, dtype="bfloat16", **options)
    state.compilations = record_compilations()


def record_compilations():
    """Return a list that receives each alignkit kernel compiled and each GEMM problem that cuBLASLt tunes."""
    import triton

    from alignkit.ops.linear import cublaslt

    compilations, trial = [], cublaslt._Trial

    def compiled(*, src, **_):
        if src.fn.__module__.startswith("alignkit"):
            compilations.append(src.fn.__name__)

    def tried(problem, chain):
        compilations.append(problem)
        return trial(problem, chain)

    triton.knobs.compilation.listener = compiled
    cublaslt._Trial = tried
    return compilations
