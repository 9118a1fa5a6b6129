"""Two Megatron tensor-parallel rank processes that run the same forward pass, with a fault of faults.py on one rank.

The processes stay alive between faults and are replaced if they die or hang. They use gloo on a CPU or NCCL on GPUs.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing as mp
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from multiprocessing import connection

import torch

from tests.forks import preload

from . import faults
from .draw import ANSWER, REJECT

preload("tests.fuzz.preload", "tests.megatron.preload")
LIMIT = 10.0
"""Timeout in seconds within which both ranks must finish a forward or raise."""
SETUP = 240.0
"""Timeout in seconds for starting the ranks and building the models."""


# On a rank.


def _serve(rank: int, port: int, device: str, checkpoints: dict[str, str], jobs, log: str) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
    import torch.distributed as dist
    from megatron.core import parallel_state

    from alignkit.jobs.store import connect_store
    from alignkit.megatron import patch_megatron
    from alignkit.megatron.cpu import cpu_host

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if device == "cuda":
        from tests.megatron.gpus import join, tensor_parallel

        join(rank, 2, store=connect_store(port))
        tensor_parallel(2)
    else:
        dist.init_process_group("gloo", store=connect_store(port), rank=rank, world_size=2)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    models: dict = {}
    with cpu_host(), patch_megatron(faults.VOCAB):
        _build(models, checkpoints)
        jobs.send(("ready",))
        while (job := jobs.recv()) is not None:
            what, seed, index = job
            if what == "build":
                models.clear()
                _build(models, checkpoints)
                jobs.send(("ready",))
            else:
                jobs.send(_outcome(models, faults.draw(seed, index), what == "fault", rank, device))


def _build(models: dict, checkpoints: dict[str, str]) -> None:
    from alignkit.megatron.build import gpt_model

    for name, (_, dtype, _) in faults.MODELS.items():
        for parallel in (False, True):
            models[name, parallel] = gpt_model(checkpoints[name], dtype, sequence_parallel=parallel)


def _outcome(models, fault: faults.Fault, odd: bool, rank: int, device: str) -> tuple:
    """Run a forward on this rank and return its outcome.

    Returns:
        ("answer", digest of the shared results, digest of this rank's gradients) or ("raised", origin, type, message).
    """
    from alignkit.errors import AlignkitError

    call = fault.call
    try:
        if odd and rank == fault.rank and fault.change is not None:
            fault.change(call)
        model = models[call.model, call.sequence_parallel]
        with contextlib.ExitStack() as stack:
            for manager in call.around:
                stack.enter_context(manager(model))
            shared = _forward(model, call, device)
            own = _backward(model, shared) if call.backward else []
        if device == "cuda":
            torch.cuda.synchronize()
        return "answer", _digest(shared), _digest(own)
    except Exception as e:
        return "raised", "alignkit" if isinstance(e, AlignkitError) else "foreign", type(e).__name__, str(e)[:600]
    finally:
        for model in models.values():
            model.zero_grad()


def _digest(tensors: list[torch.Tensor]) -> str:
    h = hashlib.blake2b(digest_size=8)
    for t in tensors:
        h.update(str((tuple(t.shape), t.dtype)).encode())
        h.update(t.detach().float().cpu().contiguous().numpy().tobytes())
    return h.hexdigest()


def _forward(model, call: faults.Call, device: str) -> list[torch.Tensor]:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from alignkit.megatron import logprobs

    def on_device(t):
        return t.to(device) if isinstance(t, torch.Tensor) and t.device.type == "cpu" and device != "cpu" else t

    tokens, positions, mask, labels, temperature, packed = map(
        on_device, (call.tokens, call.positions, call.mask, call.labels, call.temperature, call.packed)
    )
    if call.kind in ("logprobs", "packed"):
        if call.kind == "packed" and packed is None:
            starts = on_device(call.starts)
            longest = int(call.starts.diff().max())
            packed = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest
            )
        result = logprobs(
            model,
            tokens,
            positions,
            mask,
            labels,
            temperature=temperature,
            packed_seq_params=packed,
            return_entropy=call.return_entropy,
            ignore_index=call.ignore_index,
        )
        return [t for t in (result.log_probs, result.entropy) if t is not None]
    if call.kind == "loss":
        return [-model(tokens, positions, mask, labels=labels)]
    logits = call.logits(model(tokens, positions, mask))
    if call.label_smoothing:
        return [-vocab_parallel_cross_entropy(logits, labels, call.label_smoothing)]
    return [-vocab_parallel_cross_entropy(logits, labels)]


def _backward(model, shared: list[torch.Tensor]) -> list[torch.Tensor]:
    if not shared[0].requires_grad:
        return []
    torch.autograd.backward(shared, [torch.ones_like(t) for t in shared])
    return [p.grad for p in model.parameters() if p.grad is not None]


# In the parent process.


class Pair:
    """Two rank processes, which run until `stop`."""

    def __init__(self, device: str, checkpoints: dict[str, str], log: str):
        # A forked process cannot use CUDA if its parent has queried for a device.
        context = mp.get_context("forkserver" if device == "cpu" else "spawn")
        from alignkit.jobs.store import serve_store

        self._store, self.pipes, self.processes = serve_store(), [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._store.port, device, checkpoints, theirs, log), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.log, self.ready = log, False

    def wait(self) -> None:
        """Wait until both ranks have built their models."""
        if not self.ready:
            answers = self._collect(SETUP)
            if any(a != ("ready",) for a in answers):
                with open(self.log) as log:
                    raise RuntimeError(f"the ranks did not start: {answers}\n{log.read()[-3000:]}")
            self.ready = True

    def ask(self, what: str, fault: faults.Fault, limit: float) -> list[tuple]:
        """Send a job to both ranks; return each rank's answer, ("hung",) or ("ended", exit status)."""
        self.wait()
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((what, fault.seed, fault.index))
        return self._collect(limit)

    def _collect(self, limit: float) -> list[tuple]:
        found: list[tuple | None] = [None, None]
        until = time.monotonic() + limit
        while None in found and (left := until - time.monotonic()) > 0:
            waiting = {self.pipes[r]: r for r in range(2) if found[r] is None}
            for pipe in connection.wait(list(waiting), left):
                rank = waiting[pipe]
                try:
                    found[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(2)
                    found[rank] = "ended", self.processes[rank].exitcode
        return [f or ("hung",) for f in found]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()


def outcomes(
    numbers: Iterable[tuple[int, int]], device: str, checkpoints: dict[str, str], log: str, limit: float = LIMIT
) -> Iterator[tuple[faults.Fault, str, str]]:
    """Yield each fault (seed, index) with its verdict and the reason in words."""
    pair = Pair(device, checkpoints, log)
    spare = Pair(device, checkpoints, log) if device == "cuda" else None  # a pair starts slowly on GPUs
    try:
        for seed, index in numbers:
            fault = faults.draw(seed, index)
            before = pair.ask("control", fault, SETUP)
            answers = pair.ask("fault", fault, limit)
            broken = any(
                a[0] in ("hung", "ended") or (device == "cuda" and a[:2] == ("raised", "foreign")) for a in answers
            )
            verdict, reason = _verdict(fault, before, answers, device)
            if not broken:
                if fault.rebuild:
                    pair.ask("build", fault, SETUP)
                after = pair.ask("control", fault, limit)
                compared = (
                    3 if device == "cpu" else 2
                )  # on a GPU, the order of additions in the embedding's gradient varies
                if [a[:compared] for a in after] != [a[:compared] for a in before]:
                    broken = True
                    if verdict in ("right", "clear error"):
                        verdict = "wrong"
                        reason = f"left the ranks out of step: the next forward {after}, before {before}; {reason}"
            yield fault, verdict, reason
            if broken:
                pair.stop()
                pair = spare or Pair(device, checkpoints, log)
                spare = Pair(device, checkpoints, log) if device == "cuda" else None
    finally:
        for p in (pair, spare):
            if p is not None:
                p.stop()


def _verdict(fault: faults.Fault, before: list[tuple], answers: list[tuple], device: str) -> tuple[str, str]:
    outcome = "; ".join(f"rank {r}: {' '.join(map(str, a))}" for r, a in enumerate(answers))
    if any(a[0] != "answer" for a in before) or before[0][1] != before[1][1]:
        return "wrong", f"without a fault: {before}"
    kinds = [a[0] for a in answers]
    if "hung" in kinds:
        return "hung", outcome
    if "ended" in kinds and device == "cpu":
        return "crashed", outcome
    answered = [a for a in answers if a[0] == "answer"]
    if len(answered) == 2:
        if fault.must == REJECT:
            return "wrong", f"returned a result; {outcome}"
        same = [a[1] for a in answers] == [a[1] for a in before]
        return ("right", "") if same else ("wrong", f"other bits than without the fault; {outcome}")
    if answered:
        return "wrong", f"one rank returned a result; {outcome}"
    if fault.must == ANSWER:
        return "wrong", f"rejected a valid call; {outcome}"
    if device == "cpu" and answers[1 - fault.rank][1] != "alignkit":
        return "obscure", outcome
    return "clear error", outcome
