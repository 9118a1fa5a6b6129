"""Functions that the tests of pipeline, context and data parallelism run on each rank, with real Megatron-core.

`layout` switches the process groups; other helpers build on it. workers.py holds tensor parallelism.
"""

import contextlib
import inspect
import itertools
from unittest import mock

import torch
import torch.distributed as dist

from alignkit.convert import read_architecture
from alignkit.identity import sync
from alignkit.megatron import logprobs, patch_megatron, versions
from alignkit.megatron.build import whole
from alignkit.megatron.cpu import cpu_host
from alignkit.megatron.fingerprint import append_fingerprint, fingerprint
from tests.megatron import workers

_groups = {}
"""Layout -> group globals of parallel_state, reused because Megatron never destroys process groups."""


@contextlib.contextmanager
def layout(*, tp=1, pp=1, cp=1, vpp=None, ep=1, etp=None):
    """Switch Megatron to groups of these sizes; the remaining ranks are data-parallel."""
    from megatron.core import parallel_state, tensor_parallel

    with cpu_host():
        parallel_state.destroy_model_parallel()
        key = tp, pp, cp, vpp, ep, etp
        if key in _groups:
            vars(parallel_state).update(_groups[key])
        else:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                context_parallel_size=cp,
                virtual_pipeline_model_parallel_size=vpp,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=etp,
            )
            _groups[key] = {
                name: value
                for name, value in vars(parallel_state).items()
                if name.startswith("_") and not name.startswith("__") and not callable(value)
            }
        if torch.cuda.is_available():
            tensor_parallel.model_parallel_cuda_manual_seed(0)
        yield


def pipeline(_, model_dir, dtype, rows, how, fields, *, micro_batches=2, packed=False, by="logprobs", change=None):
    """Run a training step of Megatron's own schedule over a pipeline.

    Args:
        model_dir: HF directory.
        dtype: Model type.
        rows: Token lists.
        how: Arguments of `layout`.
        fields: Fields of the TransformerConfig, and `sequence_parallel`.
        micro_batches: Number of micro-batches.
        packed: Pack the sequences of a micro-batch.
        by: "logprobs" or "loss call".
        change: Function called with this rank's model chunks before the step.

    Returns:
        On the last stage, per micro-batch, the indices of this rank's labels among the counted labels and their
        logprobs; None on other stages. Then HF name -> unsharded fp32 gradient of the weights of this rank's stages.
    """
    from megatron.core import distributed
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    arch = read_architecture(model_dir)
    fields = dict(fields)
    sequence_parallel = fields.pop("sequence_parallel", False)
    if packed:  # Megatron requires the alltoall dispatcher for micro-batches of different lengths
        fields |= {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    with layout(**how), patch_megatron(arch.vocab):
        stages = [None] if how.get("vpp") is None else range(how["vpp"])
        models = [workers.build(model_dir, dtype, sequence_parallel, vp_stage=v, **fields) for v in stages]
        if change is not None:
            change(models)
        chunks = [
            distributed.DistributedDataParallel(
                model.config,
                distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True),
                model,
                disable_bucketing=i > 0,
            )
            for i, model in enumerate(models)
        ]
        multiple = how.get("tp", 1) if sequence_parallel else 1
        multiple *= 2 * how["cp"] if "cp" in how else 1
        longest = max(map(len, rows)) - 1
        parts = [micro_batch(rows[i::micro_batches], multiple, longest, packed) for i in range(micro_batches)]

        def forward_step(data, model):
            tokens, labels, params = next(data)
            counted = labels != workers.IGNORE
            numbers = counted.flatten().cumsum(0).view(counted.shape) - 1
            own = cp_part({"tokens": tokens, "labels": labels, "numbers": numbers}, params, models[0].pg_collection.cp)
            mine = own["labels"] != workers.IGNORE
            if by == "logprobs":
                output = logprobs(model, own["tokens"], None, None, own["labels"], packed_seq_params=params)
            else:
                output = model(own["tokens"], None, None, labels=own["labels"], packed_seq_params=params)

            def loss(output):
                logp = output.log_probs if by == "logprobs" else -output
                outputs = tuple(t[mine].detach().cpu() for t in (own["numbers"], logp))
                return (-logp).sum() / counted.sum(), outputs

            return output, loss

        for chunk in chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(parts) for _ in chunks] if len(chunks) > 1 else iter(parts),
            model=chunks,
            num_microbatches=micro_batches,
            seq_length=longest + -longest % multiple,
            micro_batch_size=len(rows[::micro_batches]),
        )
        distributed.finalize_model_grads(chunks)
        grads = {}
        for model in models:
            grads |= whole_grads(model, arch)
        return list(outputs) or None, grads


def pipeline_beside_another_megatron(rank, *given, **options):
    """Run `pipeline`; on the last rank, pretend that its Megatron-core is another one, which was proved there."""
    other = {"return_value": "certificate 12ab"} if dist.get_rank() == dist.get_world_size() - 1 else {}
    with mock.patch.object(versions, "evidence", **(other or {"wraps": versions.evidence})):
        return pipeline(rank, *given, **options)


def fingerprint_of(_, model_dir, dtype, how, fields, flip=None):
    """Return the fingerprint of a model in a layout as its tensors.

    flip: rank, and names of parameters with an element of which a bit is flipped there before.
    """
    how = dict(how)
    stages = [None] if how.get("vpp") is None else range(how["vpp"])
    with layout(**how), patch_megatron(read_architecture(model_dir).vocab):
        models = [workers.build(model_dir, dtype, vp_stage=v, **fields) for v in stages]
        if flip is not None and flip[0] == dist.get_rank():
            for name, parameter in models[0].named_parameters():
                if name == flip[1]:
                    parameter.data.view(torch.int16)[(0,) * parameter.ndim] ^= 1
        return fingerprint(models, model_dir).tensors


def synced(_, model_dir, dtype, how):
    """Return the names that `append_fingerprint` yields for a wrapped model, and the fingerprint at their end."""
    with layout(**how), patch_megatron(read_architecture(model_dir).vocab):
        model = torch.nn.Sequential()
        model.module = workers.build(model_dir, dtype)
        given = append_fingerprint(iter([("a", torch.ones(1))]), [model], model_dir)
        rest, packed = sync.take(given)
        return rest, sync.unpack(packed, read_architecture(model_dir).hf_shapes()).tensors


def micro_batch(rows, multiple, longest, packed):
    """Return tokens, labels and packed_seq_params of rows, padded to `longest` unless `packed`."""
    if packed:
        return workers.packed(rows, multiple)
    tokens, _, labels, _ = (t[:-1] for t in workers.batch([*rows, [0] * (longest + 1)], multiple))
    return tokens, labels, None


def cp_part(given, params, group):
    """Return the context-parallel rank's part of each tensor of a micro-batch, by name."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    if params is not None:
        index = cp_indices(params.cu_seqlens_q.tolist(), group.size(), group.rank())
        return {name: t[:, index] for name, t in given.items()}
    asked = inspect.signature(get_batch_on_this_cp_rank).parameters
    hybrid = {"is_hybrid_cp": False} if "is_hybrid_cp" in asked else {}
    return get_batch_on_this_cp_rank(given, cp_group=group, **hybrid)


def whole_grads(model, arch):
    """Return HF name -> main_grad, gathered over the tensor-parallel and the expert-parallel ranks."""
    grads = {name: p.main_grad for name, p in model.named_parameters()}
    return {name: t.cpu() for name, t in whole(model, arch, grads)}


def context(_, model_dir, dtype, rows, how, fields, *, packed=False, mask=False, change=None):
    """Run a training step under context parallelism.

    Returns:
        The positions of this rank's labels in the whole micro-batch, with their logprobs and entropies; the positions
        of all its tokens, with the gradients of their embeddings; HF name -> unsharded fp32 gradient; and this rank's
        number of tokens.
    """
    from megatron.core import distributed

    arch, fields = read_architecture(model_dir), dict(fields)
    sequence_parallel = fields.pop("sequence_parallel", False)
    cp = how.get("cp", 1)
    with layout(**how), patch_megatron(arch.vocab):
        model = workers.build(model_dir, dtype, sequence_parallel, **fields)
        embedded = []

        def keep(module, given, output):
            output.retain_grad()
            embedded.append(output)

        model.embedding.register_forward_hook(keep)
        ddp = distributed.DistributedDataParallel(
            model.config, distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
        )
        ddp.train()
        ddp.zero_grad_buffer()
        multiple = 16  # the same padding in every layout
        if packed:
            tokens, labels, params = workers.packed(rows, multiple)
        else:
            (tokens, _, labels, _), params = workers.batch(rows, multiple), None
        counted = labels != workers.IGNORE
        places = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
        given = {"tokens": tokens, "labels": labels, "places": places}
        if mask:
            given["attention_mask"] = workers.causal_mask(tokens.shape[1])
        if change is not None:
            change(given, params)
        own = cp_part(given, params, model.pg_collection.cp)
        result = logprobs(
            ddp,
            own["tokens"],
            None,
            own.get("attention_mask"),
            own["labels"],
            temperature=0.7,
            return_entropy=True,
            packed_seq_params=params,
        )
        (-result.log_probs.sum() / counted.sum()).backward()
        distributed.finalize_model_grads([ddp])
        # DDP averages over the context-parallel ranks, but each rank has only its part of the sum.
        grads = {name: g * cp for name, g in whole_grads(model, arch).items()}
        mine = own["labels"] != workers.IGNORE
        place = own["places"]
        outputs = tuple(t[mine].detach().cpu() for t in (place, result.log_probs, result.entropy))
        flow = embedded[0].grad.transpose(0, 1).flatten(0, 1).cpu()
        return outputs, (place.flatten().cpu(), flow), grads, place.numel()


def cp_indices(starts, cp, rank):
    """Return the indices of a rank's tokens in packed sequences, in TransformerEngine's context-parallel layout."""
    if cp == 1:
        return list(range(starts[-1]))
    index = []
    for begin, end in itertools.pairwise(starts):
        chunk = (end - begin) // (2 * cp)
        for number in (rank, 2 * cp - 1 - rank):
            index += range(begin + number * chunk, begin + (number + 1) * chunk)
    return index


def _is_last_stage():
    from megatron.core import parallel_state

    return parallel_state.is_pipeline_last_stage()


def set_softmax_scale(models):
    if _is_last_stage():
        models[-1].config.softmax_scale = 0.1


def change_rotary_base(models):
    if _is_last_stage():
        models[-1].rotary_base = 20000.0
        models[-1].rotary_pos_emb.inv_freq = 1.0 / 20000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)


def change_layer_number(models):
    if _is_last_stage():
        models[-1].decoder.layers[0].layer_number = 1


def second_stage_without_schedule(_, model_dir):
    """Run the second pipeline stage of a model without a schedule."""
    with layout(pp=2), patch_megatron(300):
        model = workers.build(model_dir, torch.bfloat16)
        tokens = torch.tensor([[1, 2, 3]])
        if _is_last_stage():
            model(tokens, None, None, labels=tokens)


def _is_second_cp_rank():
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_rank() == 1


def wrong_token(given, params):
    if _is_second_cp_rank():
        given["tokens"][:] = 300


def other_lengths(given, params):
    if _is_second_cp_rank():
        params.cu_seqlens_q = params.cu_seqlens_kv = params.cu_seqlens_q[[0, -1]]
        params.max_seqlen_q = params.max_seqlen_kv = int(params.cu_seqlens_q[-1])


def odd_lengths(given, params):
    if _is_second_cp_rank():
        starts = params.cu_seqlens_q.clone()
        starts[1:-1] += 2
        params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = starts
        params.max_seqlen_q = params.max_seqlen_kv = params.max_seqlen_q + 2


def wrong_label(given, params):
    if _is_second_cp_rank():
        given["labels"][:] = 300


def wrong_mask(given, params):
    if _is_second_cp_rank():
        given["attention_mask"] = ~given["attention_mask"]


class _OnCuda(torch.overrides.TorchFunctionMode):
    """Mode for Megatron's optimizers on a CPU: replaces device "cuda" by "cpu" and adds "cuda" to tensor type names."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def data_parallel(_, model_dir, dtype, rows, how, *, distributed=True, overlap=False, clip=0.0, steps=2):
    """Run steps of Megatron's Adam, each data-parallel rank on its part of `rows`.

    Returns:
        Per step, the loss and, if `clip`, the gradient norm; then the weights after all steps, by Megatron name.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    cuda = contextlib.nullcontext if torch.cuda.is_available() else _OnCuda
    with layout(**how), patch_megatron(read_architecture(model_dir).vocab):
        model = workers.build(model_dir, dtype)
        ddp = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=overlap,
                use_distributed_optimizer=distributed,
                overlap_param_gather=distributed and overlap,
                bucket_size=200_000,
            ),
            model,
        )
        ddp.train()
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            clip_grad=clip,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            overlap_param_gather=distributed and overlap,
        )
        with cuda():
            optimizer = get_megatron_optimizer(settings, [ddp])
        size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        losses = []
        for _ in range(steps):
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            loss = workers.mean_loss(ddp, rows[rank::size], 1)
            loss.backward()
            finalize_model_grads([ddp])
            with cuda():
                done, norm, _ = optimizer.step()
            assert done
            losses.append((loss.item(), norm if clip else None))
        if distributed and overlap:  # otherwise the next forward would gather the parameters
            ddp.start_param_sync(force_sync=True)
        return losses, {name: p.detach().cpu() for name, p in model.named_parameters()}
