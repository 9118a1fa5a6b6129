"""What the tests of pipeline, context and data parallelism run on each rank; all with real Megatron-core."""

import contextlib

import torch

from alignkit.convert import read_architecture, to_hf
from alignkit.megatron import logprobs, patch_megatron
from alignkit.megatron.build import whole_name
from alignkit.megatron.cpu import cpu_host
from tests.megatron import workers

_groups = {}
"""What Megatron keeps of its groups, by layout. It never destroys them, so those of one serve until the end."""


@contextlib.contextmanager
def layout(*, tp=1, pp=1, cp=1, vpp=None):
    """Megatron's groups with these sizes, in place of those that were; the rest of the ranks are data-parallel."""
    from megatron.core import parallel_state, tensor_parallel

    with cpu_host():
        parallel_state.destroy_model_parallel()
        key = tp, pp, cp, vpp
        if key in _groups:
            vars(parallel_state).update(_groups[key])
        else:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                context_parallel_size=cp,
                virtual_pipeline_model_parallel_size=vpp,
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
    """A step of Megatron's own schedule over a pipeline: the logprobs of `rows` on the last stage, else None; and HF name ->
    fp32 gradient of what this rank's stages hold, whole.

    how: `layout`'s. fields: of the TransformerConfig, with `sequence_parallel`. by: "logprobs" or the "loss call".
    change: called with this rank's chunks before the step."""
    from megatron.core import distributed, parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    arch = read_architecture(model_dir)
    fields = dict(fields)
    sequence_parallel = fields.pop("sequence_parallel", False)
    if packed:  # micro-batches of several lengths; Megatron wants that dispatcher for it
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
        longest = max(map(len, rows)) - 1
        parts = [micro_batch(rows[i::micro_batches], multiple, longest, packed) for i in range(micro_batches)]

        def forward_step(data, model):
            tokens, positions, labels, params = next(data)
            counted = labels != workers.IGNORE
            if by == "logprobs":
                output = logprobs(model, tokens, positions, None, labels, packed_seq_params=params)
            else:
                output = model(tokens, positions, None, labels=labels, packed_seq_params=params)

            def loss(output):
                logp = output.log_probs if by == "logprobs" else -output
                return (-logp).sum() / counted.sum(), logp.detach()[counted]

            return output, loss

        for chunk in chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        said = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(parts) for _ in chunks] if len(chunks) > 1 else iter(parts),
            model=chunks,
            num_microbatches=micro_batches,
            seq_length=longest + -longest % multiple,
            micro_batch_size=len(rows[::micro_batches]),
        )
        distributed.finalize_model_grads(chunks)
        grads = {}
        group = parallel_state.get_tensor_model_parallel_group()
        for model in models:
            grads |= whole_grads(model, arch, group)
        return list(said) or None, grads


def micro_batch(rows, multiple, longest, packed):
    """tokens, positions, labels and packed_seq_params of some rows, padded to `longest` unless they are packed."""
    if packed:
        tokens, labels, params = workers.packed(rows, multiple)
        return tokens, None, labels, params
    padding = [[0] * (longest + 1)]
    tokens, positions, labels, _ = (t[:-1] for t in workers.batch(rows + padding, multiple))
    return tokens, positions, labels, None


def whole_grads(model, arch, group):
    """HF name -> main_grad, put together of the tensor-parallel ranks' parts."""
    from alignkit.dist import TP

    grads = {whole_name(model, name): p.main_grad for name, p in model.named_parameters()}
    return {name: t.cpu() for name, t in to_hf(arch, grads, lambda name: TP(group).all_gather(grads[name]))}


def _last():
    from megatron.core import parallel_state

    return parallel_state.is_pipeline_last_stage()


def refused_field(models):
    if _last():
        models[-1].config.softmax_scale = 0.1


def another_base(models):
    if _last():
        models[-1].rotary_base = 20000.0
        models[-1].rotary_pos_emb.inv_freq = 1.0 / 20000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)


def another_layer(models):
    if _last():
        models[-1].decoder.layers[0].layer_number = 1


def no_hidden_states(_, model_dir):
    """The second stage of a model outside of any schedule."""
    with layout(pp=2), patch_megatron(300):
        model = workers.build(model_dir, torch.bfloat16)
        tokens = torch.tensor([[1, 2, 3]])
        if _last():
            model(tokens, None, None, labels=tokens)
