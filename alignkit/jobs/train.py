"""Training worker: ``python -m alignkit.jobs.train JOB.json`` recomputes logprobs with a Megatron-core model.

Fields of a job:

- ``model``: HF directory; ``dtype``: "bfloat16" or "float32"; ``patched``: bool.
- ``tp``: int; ``sequence_parallel`` (default false).
- ``ep`` (default 1): expert-parallel size; each rank has whole experts.
- ``pp`` (default 1): pipeline-parallel size; ``cp`` (default 1): context-parallel size.
- ``spec`` (default "local"): layer spec of Megatron-core ("local") or TransformerEngine ("te").
- ``temperature`` (default 1.0, patched only).
- ``micro_batch``: maximum tokens of a micro-batch, padding included; null for a single micro-batch.
- ``runs``: list of ``{"mode": "one" | "padded" | "packed", "in": logprob file, "out": path}``. For MoE models without
  pipeline and context parallelism also ``"routing": true``, which saves the selected experts.

The model is built once, in max(tp * pp * cp, ep) processes. Each run writes the logprobs of the tokens of its ``in``
file. If ``ep`` exceeds ``tp``, the additional ranks are data-parallel, and all compute the same tokens. An unpatched
model is stock Megatron-core: it includes padded vocabulary columns in the softmax, accepts packed input only with
TransformerEngine's attention, and materializes the logits of a whole micro-batch.

`plan` writes the jobs: a new field changes `_FIELDS` here and `plan.jobs`. `alignkit.bisect.megatron_side` calls
`launch` with its own function, which replaces the runs. `layout` runs the forward under pipeline and context
parallelism.
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

from alignkit.convert import Architecture, check_ep, read_architecture
from alignkit.dist import CP
from alignkit.drift.files import Logprobs, load, save
from alignkit.errors import InputError, UnsupportedError
from alignkit.jobs import forks
from alignkit.jobs.layout import over_context_chunks, through_stages
from alignkit.jobs.routing import Choices, Placed, file_of
from alignkit.jobs.store import connect_store, listen, serve_store
from alignkit.runtime.ids import contract_id
from alignkit.runtime.machine import gpu_of, installed

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SPECS = ("local", "te")
IGNORE = -100
"""Label of a position without a logprob."""
_FAILURE = "failure"
"""Key of the first failing rank's traceback in the ranks' store."""


def run_job(job: dict[str, Any]) -> None:
    """Run a job in the format of the module's docstring.

    Raises InputError or UnsupportedError for an invalid job before a process starts. If a rank fails, the other ranks
    are stopped and RuntimeError is raised with the first failing rank's traceback.
    """
    _check(job)
    launch(job, _recompute_runs)


def launch(job: dict[str, Any], body: Callable) -> None:
    """Build the job's model in its processes and call ``body(rank, job, model, contract)`` in each.

    `body` must be a module-level function, which the processes import. Errors of ranks are raised as in `run_job`.
    """
    ranks = _ranks(job)
    # The kernels read their thread count from this variable; ranks share the machine's cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if ranks == 1:
        return _rank(0, job, body, dist.HashStore())
    listener = listen()
    method = "fork" if forks.forked else "spawn"  # a forked engine has all imports and has not started any work
    started = torch.multiprocessing.start_processes(
        _guarded, (job, body, listener.getsockname()[1]), nprocs=ranks, join=False, start_method=method
    )
    store = serve_store(listener)
    try:
        while not started.join():
            pass
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException):
        if store.check([_FAILURE]):
            raise RuntimeError(store.get(_FAILURE).decode()) from None
        raise  # the rank was killed and left no traceback


def _guarded(rank: int, job: dict[str, Any], body: Callable, port: int) -> None:
    """Run `_rank` and store the traceback of the first failing rank for the parent process.

    Later failures of other ranks only report the lost peer.
    """
    store = connect_store(port)
    try:
        _rank(rank, job, body, store)
    except BaseException:
        store.compare_set(_FAILURE, "", f"rank {rank} of {_ranks(job)}:\n{traceback.format_exc()}")
        raise
    # All output is written. Destroying gloo groups while peers exit occasionally calls std::terminate; skip it.
    sys.stdout.flush()
    os._exit(0)


def _ranks(job: dict[str, Any]) -> int:
    return max(job["tp"] * job.get("pp", 1) * job.get("cp", 1), job.get("ep", 1))


_SIZES = ("tp", "ep", "pp", "cp")
"""Fields of a job with a parallel size."""
_FIELDS = {"model", "dtype", "patched", *_SIZES, "sequence_parallel", "spec", "temperature", "micro_batch", "runs"}


def _check(job: dict[str, Any]) -> None:
    if unknown := set(job) - _FIELDS:
        raise InputError(
            f"job: may have the fields {', '.join(sorted(_FIELDS))}, got unknown: {', '.join(sorted(unknown)):.200}"
        )
    for field in ("model", "dtype", "patched", "tp", "runs"):
        if field not in job:
            raise InputError(f"job: field {field!r} is missing")
    if job["dtype"] not in DTYPES:
        raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, got {job['dtype']!r}")
    for field in _SIZES:
        if not isinstance(job.get(field, 1), int):
            raise InputError(f"{field}: expected an integer, got {job[field]!r}")
    check_layout(
        read_architecture(job["model"]),
        patched=job["patched"],
        **{field: job[field] for field in (*_SIZES, "spec") if field in job},
    )
    if job.get("micro_batch") is not None and not (isinstance(job["micro_batch"], int) and job["micro_batch"] > 0):
        raise InputError(f"micro_batch: expected a positive integer or null, got {job['micro_batch']!r}")
    if job.get("temperature", 1.0) != 1.0 and not job["patched"]:
        raise UnsupportedError(f"temperature: must be 1.0 for stock Megatron-core, got {job['temperature']!r}")
    for i, run in enumerate(job["runs"]):
        if run["mode"] not in _MODES:
            raise InputError(f"runs[{i}].mode: expected one of {', '.join(_MODES)}, got {run['mode']!r:.80}")
        if run["mode"] == "packed" and not job["patched"] and job.get("spec", "local") == "local":
            raise UnsupportedError(
                f"runs[{i}].mode: must be one or padded for stock Megatron-core with spec = local, got 'packed'"
            )


def check_layout(
    architecture: Architecture, *, patched: bool, tp: int, ep: int = 1, pp: int = 1, cp: int = 1, spec: str = "local"
) -> None:
    """Raise InputError or UnsupportedError if this worker cannot build `architecture` with this parallel layout."""
    check_spec(spec)
    architecture.check_tp(tp)
    check_ep(architecture, ep)
    if ep > 1 and max(tp, ep) % min(tp, ep):
        raise InputError(f"ep: must be a divisor or a multiple of tp = {tp}, got {ep}")
    if pp < 1 or architecture.layers % pp:
        raise InputError(f"pp: must divide the model's {architecture.layers} layers, got {pp}")
    if cp < 1:
        raise InputError(f"cp: must be positive, got {cp}")
    if why := CP.refusal(cp, architecture.heads // tp, architecture.kv_heads // tp):
        raise InputError(f"cp: {why}")
    if cp > 1 and not patched:
        raise UnsupportedError(f"cp: must be 1 for stock Megatron-core in alignkit check, got {cp}")
    if ep > 1 and pp * cp > 1:
        raise UnsupportedError(
            f"ep: must be 1 if pp or cp is more than 1 in alignkit check, got ep = {ep}, pp = {pp}, cp = {cp}"
        )


def check_spec(spec: str) -> None:
    """Raise InputError for an unknown layer spec, and UnsupportedError if the package that it requires is missing."""
    if spec not in SPECS:
        raise InputError(f"spec: expected one of {', '.join(SPECS)}, got {spec!r}")
    if spec == "te" and not installed("transformer_engine"):
        raise UnsupportedError(
            "spec: te requires TransformerEngine, which is not installed. Run pip install --no-build-isolation "
            "'transformer-engine[pytorch]', or omit te from --training."
        )


def _rank(rank: int, job: dict[str, Any], body: Callable, store: dist.Store) -> None:
    """Initialize one rank, build its model and call `body`."""
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
        if gpu:  # Megatron forks this RNG even if nothing is random
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
        contract = contract_id(next(model.parameters()).device) if job["patched"] else "stock"
        body(rank, job, model, contract)
    dist.barrier()  # no rank exits before the others are done
    if ranks == 1:
        dist.destroy_process_group()


def _recompute_runs(rank: int, job: dict[str, Any], model, contract: str) -> None:
    """Execute the job's runs; rank 0 writes the results."""
    import megatron.core

    from alignkit.megatron.fingerprint import fingerprint

    weights = fingerprint(model, job["model"]).digest if job["patched"] else None
    temperature = job.get("temperature", 1.0)
    for run in job["runs"]:
        given = load(run["in"])
        _require_prompts(given, run["in"])
        with Choices(model) if run.get("routing") else nullcontext() as choices:
            logprobs = recompute(
                model,
                given,
                run["mode"],
                temperature=temperature,
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
            identity = {"weights": weights, "temperature": temperature}
            save(run["out"], Logprobs(given.prompts, given.tokens, logprobs, contract, meta, **identity))
            print(f"{run['mode']}: {sum(map(len, given.tokens))} tokens -> {run['out']}", flush=True)


def recompute(
    model, given: Logprobs, mode: str, *, temperature: float = 1.0, patched: bool = True, micro_batch: int | None = None
) -> list[torch.Tensor]:
    """Return the fp32 logprobs of `given`'s tokens, one tensor per sequence. Collective over the model's ranks.

    micro_batch: maximum tokens of a micro-batch, padding included; a longer sequence forms its own micro-batch.

    Raises InputError for an empty prompt, because the first token of a sequence has no logprob.
    """
    _require_prompts(given, "given")
    result = [torch.empty(0)] * len(given.tokens)
    device = next(model.parameters()).device
    sampled = [i for i, tokens in enumerate(given.tokens) if tokens]

    def stage_logp(tokens, positions, mask, labels, packed) -> torch.Tensor:
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

    full_logp = over_context_chunks(model, through_stages(model, stage_logp))

    def logp(tokens, labels, mask=None, packed=None) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
        return full_logp(tokens, positions, mask, labels, packed)

    multiple = _multiple(model)
    if sampled:
        pairs = [(given.prompts[i], given.tokens[i]) for i in sampled]
        values = [
            value for part in _micro_batches(pairs, micro_batch) for value in _MODES[mode](logp, part, multiple, device)
        ]
        for i, value in zip(sampled, values, strict=True):
            result[i] = value.cpu()
    return result


def _require_prompts(given: Logprobs, source: str) -> None:
    if not all(given.prompts):
        raise InputError(
            f"{source}: prompts[{given.prompts.index([])}]: must have at least one token id, got none. "
            "Megatron-core computes no logprob for the first token of a sequence."
        )


def _multiple(model) -> int:
    """Return the number that sequence lengths must be a multiple of under sequence and context parallelism."""
    multiple = model.config.tensor_model_parallel_size if model.config.sequence_parallel else 1
    if model.config.context_parallel_size > 1:  # each rank has two chunks of every sequence
        multiple *= 2 * model.config.context_parallel_size
    return multiple


Pairs = list[tuple[list[int], list[int]]]
"""(prompt, sampled tokens) of each sequence; neither is empty."""


def _micro_batches(pairs: Pairs, tokens: int | None) -> Iterator[Pairs]:
    """Yield consecutive groups of sequences with at most `tokens` tokens each when padded."""
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
    """Return the placement of sequences in each forward of `recompute`, for pp = cp = 1."""
    sampled = [i for i, tokens in enumerate(given.tokens) if tokens]
    sequences, forwards = iter(sampled), []
    for part in _micro_batches([(given.prompts[i], given.tokens[i]) for i in sampled], micro_batch):
        if mode == "packed":  # concatenated
            lengths = [len(prompt) + len(tokens) - 1 for prompt, tokens in part]
            starts = [0, *itertools.accumulate(n + -n % multiple for n in lengths)][:-1]
            forwards.append([Placed(next(sequences), start, 1) for start in starts])
        elif mode == "padded":  # [s, b] order
            forwards.append([Placed(next(sequences), i, len(part)) for i in range(len(part))])
        else:
            forwards += [[Placed(next(sequences), 0, 1)] for _ in part]
    return forwards


def _padded(logp: Callable, pairs: Pairs, multiple: int, device: torch.device) -> list[torch.Tensor]:
    """Run sequences as a right-padded micro-batch ``[b, s]``; s is a multiple of `multiple`."""
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
    # Megatron builds its default mask on a GPU, so pass one; True masks out.
    mask = torch.ones(1, 1, s, s, dtype=torch.bool, device=device).triu(1)
    out = logp(tokens, labels, mask)
    return [out[i, first:end].clone() for i, (first, end) in enumerate(spans)]


def _one(logp: Callable, pairs: Pairs, multiple: int, device: torch.device) -> list[torch.Tensor]:
    """Run each sequence as its own micro-batch."""
    return [_padded(logp, [pair], multiple, device)[0] for pair in pairs]


def _packed(logp: Callable, pairs: Pairs, multiple: int, device: torch.device) -> list[torch.Tensor]:
    """Run sequences packed in one row (THD), each padded to a multiple of `multiple`."""
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
        raise SystemExit("usage: python -m alignkit.jobs.train JOB.json")
    with open(arguments[0]) as f:
        job = json.load(f)
    run_job(job)


if __name__ == "__main__":
    main(sys.argv[1:])
