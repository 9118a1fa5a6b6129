"""Recomputes logprobs with a real Megatron-core model: ``python -m alignkit.check.train JOB.json``.

JOB: {"model": HF directory, "dtype": "bfloat16" | "float32", "patched": bool, "tp": 1 | 2 | ...,
"sequence_parallel": bool, "ep": 1 | 2 | ... (optional: expert-parallel ranks, of which each has whole experts),
"spec": "local" | "te" (optional: the layer spec, Megatron-core's own or TransformerEngine's),
"pp": 1 | 2 | ..., "cp": 1 | 2 | ... (optional: pipeline stages, and ranks that share each sequence),
"temperature": 1.0 (optional, patched only),
"micro_batch": tokens in a micro-batch, with their padding (optional; null: everything in one),
"runs": [{"mode": "one" | "padded" | "packed", "in": logprob file, "out": path, "routing": false (optional; of a model
with experts, without stages and context parallelism: save what its routers choose)}, ...]}

The model is built once, in `tp` times `pp` times `cp` processes, or in `ep` if those are more, and each run writes the
logprobs of the tokens of its `in` file. With `ep` above `tp` ranks are data-parallel, and all compute the same tokens.
Unpatched, it is Megatron as it comes: it counts the padded columns of the vocabulary, takes packed input in
TransformerEngine's attention alone, and keeps the logits of a whole micro-batch.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from alignkit.check import forks
from alignkit.check.layout import over_parts, through_stages
from alignkit.check.machine import gpu_of, installed
from alignkit.check.routing import Choices, Placed, file_of
from alignkit.check.store import listening, meet, served
from alignkit.contract import contract_id
from alignkit.convert import Architecture, check_ep, read_architecture
from alignkit.dist import CP
from alignkit.drift.files import Logprobs, load, save
from alignkit.errors import InputError, UnsupportedError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SPECS = ("local", "te")
IGNORE = -100
_FAILURE = "failure"


def run_job(job: dict[str, Any]) -> None:
    """Runs the job of the module's docstring.

    Raises InputError or UnsupportedError for a job that cannot run, before a process is started, and
    RuntimeError with the traceback of the first rank that failed, after the others have been ended.
    """
    _check(job)
    launch(job, _recompute_runs)


def launch(job: dict[str, Any], body: Callable) -> None:
    """Builds the model of `job` in its processes and calls ``body(rank, job, model, contract)`` in each; `body` is
    a function of a module, which the processes import. Errors of the ranks are as in `run_job`."""
    ranks = _ranks(job)
    # The kernels take their threads from this variable; ranks share the machine's cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if ranks == 1:
        return _rank(0, job, body, dist.HashStore())
    listener = listening()
    method = "fork" if forks.forked else "spawn"  # in a fork all is imported, and nothing has been done yet
    started = torch.multiprocessing.start_processes(
        _guarded, (job, body, listener.getsockname()[1]), nprocs=ranks, join=False, start_method=method
    )
    store = served(listener)
    try:
        while not started.join():
            pass
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException):
        if store.check([_FAILURE]):
            raise RuntimeError(store.get(_FAILURE).decode()) from None
        raise  # killed: there is no traceback


def _guarded(rank: int, job: dict[str, Any], body: Callable, port: int) -> None:
    """`_rank`, leaving the traceback of the first rank that fails with the parent: the others then fail too,
    for want of their peer, and say less."""
    store = meet(port)
    try:
        _rank(rank, job, body, store)
    except BaseException:
        store.compare_set(_FAILURE, "", f"rank {rank} of {_ranks(job)}:\n{traceback.format_exc()}")
        raise
    # All is written. Taking gloo's groups apart now and then ends a rank by std::terminate, as its peers leave.
    sys.stdout.flush()
    os._exit(0)


def _ranks(job: dict[str, Any]) -> int:
    return max(job["tp"] * job.get("pp", 1) * job.get("cp", 1), job.get("ep", 1))


_SIZES = ("tp", "ep", "pp", "cp")
_FIELDS = {"model", "dtype", "patched", *_SIZES, "sequence_parallel", "spec", "temperature", "micro_batch", "runs"}


def _check(job: dict[str, Any]) -> None:
    if unknown := set(job) - _FIELDS:
        raise InputError(f"job: unknown fields {', '.join(sorted(unknown))}")
    for field in ("model", "dtype", "patched", "tp", "runs"):
        if field not in job:
            raise InputError(f"job: field {field!r} is missing")
    if job["dtype"] not in DTYPES:
        raise InputError(f"dtype: {job['dtype']!r} is not one of {', '.join(DTYPES)}")
    for field in _SIZES:
        if not isinstance(job.get(field, 1), int):
            raise InputError(f"{field}: {job[field]!r} is not an integer")
    check_layout(
        read_architecture(job["model"]),
        patched=job["patched"],
        **{field: job[field] for field in (*_SIZES, "spec") if field in job},
    )
    if job.get("micro_batch") is not None and not (isinstance(job["micro_batch"], int) and job["micro_batch"] > 0):
        raise InputError(f"micro_batch: {job['micro_batch']!r} is not a positive integer")
    if job.get("temperature", 1.0) != 1.0 and not job["patched"]:
        raise UnsupportedError("temperature: stock Megatron's loss has none")
    for run in job["runs"]:
        if run["mode"] not in _MODES:
            raise InputError(f"mode: {run['mode']!r} is not one of {', '.join(_MODES)}")
        if run["mode"] == "packed" and not job["patched"] and job.get("spec", "local") == "local":
            raise UnsupportedError("mode: stock Megatron's local attention takes no packed sequences")


def check_layout(
    architecture: Architecture, *, patched: bool, tp: int, ep: int = 1, pp: int = 1, cp: int = 1, spec: str = "local"
) -> None:
    """Raises InputError or UnsupportedError for a layout that a model of `architecture` is not built in here."""
    if spec not in SPECS:
        raise InputError(f"spec: {spec!r} is not one of {', '.join(SPECS)}")
    if spec == "te" and not installed("transformer_engine"):
        raise UnsupportedError("spec: TransformerEngine is not installed")
    architecture.check_tp(tp)
    check_ep(architecture, ep)
    if ep > 1 and max(tp, ep) % min(tp, ep):
        raise InputError(f"ep: {ep} expert-parallel ranks and {tp} tensor-parallel ones share no number of ranks")
    if pp < 1 or architecture.layers % pp:
        raise InputError(f"pp: {pp} stages do not divide {architecture.layers} layers")
    if cp < 1:
        raise InputError(f"cp: {cp} is not positive")
    if why := CP.refusal(cp, architecture.heads // tp, architecture.kv_heads // tp):
        raise InputError(f"cp: {why}")
    if cp > 1 and not patched:
        raise UnsupportedError("cp: stock Megatron's context parallelism is not run here")
    if ep > 1 and pp * cp > 1:
        raise UnsupportedError("ep: with pipeline or context parallelism it is not run here")


def _rank(rank: int, job: dict[str, Any], body: Callable, store: dist.Store) -> None:
    """One rank."""
    ranks, ep = _ranks(job), job.get("ep", 1)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(gpu_of(rank))
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=ranks)

    from megatron.core import parallel_state, tensor_parallel

    from alignkit.megatron import cpu, patch_megatron

    with cpu.cpu_host(), torch.no_grad():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=job["tp"],
            pipeline_model_parallel_size=job.get("pp", 1),
            context_parallel_size=job.get("cp", 1),
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1 if ep > 1 else None,
        )
        if gpu:  # Megatron forks this generator even where nothing is random
            tensor_parallel.model_parallel_cuda_manual_seed(0)
        if job["patched"]:
            patch_megatron(read_architecture(job["model"]).vocab)
        from alignkit.megatron.build import gpt_model

        model = gpt_model(
            job["model"],
            DTYPES[job["dtype"]],
            sequence_parallel=job.get("sequence_parallel", False),
            transformer_engine=job.get("spec") == "te",
        )
        computed_with = contract_id(next(model.parameters()).device) if job["patched"] else "stock"
        body(rank, job, model, computed_with)
    dist.barrier()  # no rank leaves before the others are done
    if ranks == 1:
        dist.destroy_process_group()


def _recompute_runs(rank: int, job: dict[str, Any], model, contract: str) -> None:
    """The job's runs; rank 0 writes the results."""
    import megatron.core

    for run in job["runs"]:
        given = load(run["in"])
        with Choices(model) if run.get("routing") else nullcontext() as choices:
            logprobs = recompute(
                model,
                given,
                run["mode"],
                temperature=job.get("temperature", 1.0),
                patched=job["patched"],
                micro_batch=job.get("micro_batch"),
            )
        if choices is not None:
            forwards = _forwards(given, run["mode"], _multiple(model), job.get("micro_batch"))
            chosen = choices.of(given, forwards)
            if rank == 0:
                save_file({"chosen": chosen}, file_of(run["out"]))
        if rank == 0:
            meta = {
                "engine": f"megatron-core {megatron.core.__version__}",
                "mode": run["mode"],
                **{k: str(job.get(k, False)) for k in ("dtype", "tp", "sequence_parallel")},
                **{k: str(job.get(k, 1)) for k in ("ep", "pp", "cp")},
                "spec": job.get("spec", "local"),
            }
            save(run["out"], Logprobs(given.prompts, given.tokens, logprobs, contract, meta))
            print(f"{run['mode']}: {sum(map(len, given.tokens))} tokens -> {run['out']}", flush=True)


def recompute(
    model, given: Logprobs, mode: str, *, temperature: float = 1.0, patched: bool = True, micro_batch: int | None = None
) -> list[torch.Tensor]:
    """fp32 logprobs of `given`'s tokens, one tensor a sequence. A collective of the model's ranks.

    micro_batch: most tokens of a micro-batch, its padding included; a longer sequence is one by itself.

    Raises InputError for a sequence whose prompt is empty: nothing says how its first token was drawn.
    """
    if not all(given.prompts):
        raise InputError(f"in: the prompt of sequence {given.prompts.index([])} is empty")
    result = [torch.empty(0)] * len(given.tokens)
    device = next(model.parameters()).device
    drawn = [i for i, tokens in enumerate(given.tokens) if tokens]

    def of_stage(tokens, positions, mask, labels, packed) -> torch.Tensor:
        if patched:
            from alignkit.megatron import logprobs

            out = logprobs(
                model,
                tokens,
                positions,
                mask,
                labels,
                temperature=temperature,
                ignore_index=IGNORE,
                packed_seq_params=packed,
            )
            return out.log_probs if model.post_process else out
        out = model(tokens, positions, mask, labels=labels, packed_seq_params=packed)
        return -out.float() if model.post_process else out

    of_all = over_parts(model, through_stages(model, of_stage))

    def logp(tokens, labels, mask=None, packed=None) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
        return of_all(tokens, positions, mask, labels, packed)

    multiple = _multiple(model)
    if drawn:
        pairs = [(given.prompts[i], given.tokens[i]) for i in drawn]
        values = [
            value for part in _micro_batches(pairs, micro_batch) for value in _MODES[mode](logp, part, multiple, device)
        ]
        for i, value in zip(drawn, values, strict=True):
            result[i] = value.cpu()
    return result


def _multiple(model) -> int:
    """What the length of a sequence must be a multiple of."""
    multiple = model.config.tensor_model_parallel_size if model.config.sequence_parallel else 1
    if model.config.context_parallel_size > 1:  # each of its ranks has two chunks of every sequence
        multiple *= 2 * model.config.context_parallel_size
    return multiple


Pairs = list[tuple[list[int], list[int]]]
"""Prompt and sampled tokens of each sequence; neither is empty."""


def _micro_batches(pairs: Pairs, tokens: int | None) -> Iterator[Pairs]:
    """The sequences in their order, so many at a time that they have at most `tokens` when padded."""
    part: Pairs = []
    longest = 0
    for pair in pairs:
        length = max(longest, len(pair[0]) + len(pair[1]))
        if part and tokens is not None and length * (len(part) + 1) > tokens:
            yield part
            part, length = [], len(pair[0]) + len(pair[1])
        part.append(pair)
        longest = length
    yield part


def _forwards(given: Logprobs, mode: str, multiple: int, micro_batch: int | None) -> list[list[Placed]]:
    """Where each forward of `recompute` has the rows of which sequences, without stages and context parallelism."""
    drawn = [i for i, tokens in enumerate(given.tokens) if tokens]
    left, forwards = iter(drawn), []
    for part in _micro_batches([(given.prompts[i], given.tokens[i]) for i in drawn], micro_batch):
        if mode == "packed":  # end to end
            lengths = [len(prompt) + len(sampled) - 1 for prompt, sampled in part]
            starts = [0, *itertools.accumulate(n + -n % multiple for n in lengths)][:-1]
            forwards.append([Placed(next(left), start, 1) for start in starts])
        elif mode == "padded":  # Megatron's order: of all sequences, position by position
            forwards.append([Placed(next(left), i, len(part)) for i in range(len(part))])
        else:
            forwards += [[Placed(next(left), 0, 1)] for _ in part]
    return forwards


def _padded(logp: Callable, pairs: Pairs, multiple: int, device: torch.device) -> list[torch.Tensor]:
    """Sequences as a micro-batch ``[b, s]``, padded on the right; s is a multiple of `multiple`."""
    rows = [prompt + sampled for prompt, sampled in pairs]
    s = max(len(row) for row in rows) - 1
    s += -s % multiple
    tokens = torch.zeros(len(rows), s, dtype=torch.int64, device=device)
    labels = torch.full_like(tokens, IGNORE)
    spans = []
    for i, (row, (prompt, sampled)) in enumerate(zip(rows, pairs, strict=True)):
        first, end = len(prompt) - 1, len(row) - 1
        tokens[i, :end] = torch.tensor(row[:-1])
        labels[i, first:end] = torch.tensor(sampled)
        spans.append((first, end))
    # Megatron makes the default mask on a GPU, so one is given; True hides.
    mask = torch.ones(1, 1, s, s, dtype=torch.bool, device=device).triu(1)
    out = logp(tokens, labels, mask)
    return [out[i, first:end].clone() for i, (first, end) in enumerate(spans)]


def _one(logp: Callable, pairs: Pairs, multiple: int, device: torch.device) -> list[torch.Tensor]:
    """Each sequence in a micro-batch of its own."""
    return [_padded(logp, [pair], multiple, device)[0] for pair in pairs]


def _packed(logp: Callable, pairs: Pairs, multiple: int, device: torch.device) -> list[torch.Tensor]:
    """Sequences end to end in one row (THD), each padded to a multiple of `multiple`."""
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens, labels, spans, starts = [], [], [], [0]
    for prompt, sampled in pairs:
        row = (prompt + sampled)[:-1]
        padding = -len(row) % multiple
        spans.append((starts[-1] + len(prompt) - 1, starts[-1] + len(row)))
        tokens += row + [0] * padding
        labels += [IGNORE] * (len(prompt) - 1) + sampled + [IGNORE] * padding
        starts.append(len(tokens))
    longest = max(b - a for a, b in itertools.pairwise(starts))
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    out = logp(*(torch.tensor([ids], device=device) for ids in (tokens, labels)), packed=packed)[0]
    return [out[first:end].clone() for first, end in spans]


_MODES = {"one": _one, "padded": _padded, "packed": _packed}


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit("usage: python -m alignkit.check.train JOB.json")
    with open(arguments[0]) as f:
        job = json.load(f)
    run_job(job)


if __name__ == "__main__":
    main(sys.argv[1:])
