"""Functions that the tests of dense models run on each tensor-parallel rank, with real Megatron-core.

The ranks unpickle them by name. Tests read the keys of `all_calls`. layouts.py adds other kinds of parallelism, moe.py
MoE models, hybrids.py HybridModel, te_workers.py TransformerEngine.
"""

import contextlib
import copy
import itertools

import torch

from alignkit.convert import read_architecture, to_hf
from alignkit.drift.files import Logprobs
from alignkit.jobs.train import recompute
from alignkit.megatron import logprobs, patch_megatron
from alignkit.megatron.cpu import cpu_host

IGNORE = -100
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def megatron(tp):
    """Initialize Megatron's process groups, unless they exist, with all ranks of `tp` tensor-parallel."""
    from megatron.core import parallel_state

    with cpu_host():
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp.size)
        yield


def build(model_dir, dtype, sequence_parallel=False, **overrides):
    from alignkit.megatron.build import gpt_model

    return gpt_model(model_dir, dtype, sequence_parallel=sequence_parallel, **overrides)


def deep_copy(model):
    """Return a deep copy that shares the process groups, which cannot be copied."""
    groups = [*vars(model.pg_collection).values(), *(vars(m).get("tp_group") for m in model.modules())]
    return copy.deepcopy(model, {id(group): group for group in groups})


def as_logprobs(rows):
    """Return token lists as `Logprobs` whose prompts are the first tokens."""
    return Logprobs(
        [row[:1] for row in rows], [row[1:] for row in rows], [torch.zeros(len(row) - 1) for row in rows], "none"
    )


def batch(rows, multiple=1):
    """Return tokens, positions, labels and the mask of counted labels, ``[b, s]``, of rows padded on the right."""
    s = max(map(len, rows)) - 1
    s += -s % multiple
    tokens = torch.zeros(len(rows), s, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORE)
    for i, row in enumerate(rows):
        tokens[i, : len(row) - 1], labels[i, : len(row) - 1] = torch.tensor(row[:-1]), torch.tensor(row[1:])
    return (t.to(DEVICE) for t in (tokens, torch.arange(s).expand_as(tokens), labels, labels != IGNORE))


def all_calls(tp, model_dir, dtype, sequence_parallel, rows, **config):
    """Compute the logprobs of `rows` by every call and micro-batch layout that the package supports.

    Args:
        tp: Tensor-parallel group.
        model_dir: HF directory.
        dtype: Model type.
        sequence_parallel: Use sequence parallelism.
        rows: Token lists.
        **config: Arguments of `build`.

    Returns:
        Name of the call -> fp32 logprobs, or entropies, of all rows, concatenated.
    """
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    vocab = read_architecture(model_dir).vocab
    with megatron(tp), patch_megatron(vocab), torch.no_grad():
        model = build(model_dir, dtype, sequence_parallel, **config)
        given = as_logprobs(rows)
        result = {mode: torch.cat(recompute(model, given, mode)) for mode in ("one", "padded", "packed")}
        tokens, positions, labels, counted = batch(rows, tp.size if sequence_parallel else 1)
        result["loss call"] = -model(tokens, positions, None, labels=labels)[counted]
        logits = model(tokens, positions, None)
        assert logits.dtype == torch.float32
        result["logits"] = -vocab_parallel_cross_entropy(logits, labels)[counted]
        for temperature in (1.0, 0.7):
            asked = logprobs(model, tokens, positions, None, labels, temperature=temperature, return_entropy=True)
            result[f"logprobs at {temperature}"] = asked.log_probs[counted]
            result[f"entropy at {temperature}"] = asked.entropy[counted]
        # A tensor, because CUDA turns division by a Python scalar into multiplication by its reciprocal.
        cooled = logits / torch.full((1,), 0.7, device=logits.device)
        result["logits at 0.7"] = -vocab_parallel_cross_entropy(cooled, labels)[counted]
    return result


def step(
    tp,
    model_dir,
    dtype,
    sequence_parallel,
    rows,
    *,
    wrapped=False,
    overlap=False,
    micro_batches=1,
    keep_logits=False,
    **config,
):
    """Run a backward pass of the mean loss under Megatron's DDP and its reductions.

    Rows have the padding of sequence parallelism in either case: torch's gradient of the embedding depends on the
    position of a token in the batch.

    Args:
        tp: Tensor-parallel group.
        model_dir: HF directory.
        dtype: Model type.
        sequence_parallel: Use sequence parallelism.
        rows: Token lists.
        wrapped: Wrap the model in a Float16Module.
        overlap: Reduce gradients during the backward pass.
        micro_batches: Number of micro-batches.
        keep_logits: Argument of `patch_megatron`.
        **config: Fields of the TransformerConfig.

    Returns:
        The loss, and HF name -> unsharded fp32 gradient.
    """
    from megatron.core import distributed
    from megatron.core.transformer.module import Float16Module

    from alignkit.megatron.build import whole_name

    arch = read_architecture(model_dir)
    with megatron(tp), patch_megatron(arch.vocab, keep_logits=keep_logits):
        model = build(model_dir, dtype, sequence_parallel, **config)
        ddp = distributed.DistributedDataParallel(
            model.config,
            distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap),
            Float16Module(model.config, model) if wrapped else model,
        )
        ddp.train()
        ddp.zero_grad_buffer()
        total = 0.0
        parts = [rows[i::micro_batches] for i in range(micro_batches)]
        for i, part in enumerate(parts):
            with contextlib.nullcontext() if i == len(parts) - 1 else ddp.no_sync():
                loss = mean_loss(ddp, part, len(parts), tp.size)
                loss.backward()
                total += loss.item()
        distributed.finalize_model_grads([ddp])
        grads = {whole_name(model, name): p.main_grad for name, p in model.named_parameters()}
        return total, gather(tp, arch, grads)


def step_without_ddp(tp, model_dir, dtype, sequence_parallel, rows, *, micro_batches=1, **config):
    """Return the gradients that `step` must give: those of the model without DDP, summed over micro-batches in fp32.

    With sequence parallelism, the gradients of norms differ: each rank has the sum over its own tokens.
    """
    arch = read_architecture(model_dir)
    with megatron(tp), patch_megatron(arch.vocab):
        model = build(model_dir, dtype, sequence_parallel, **config).train()
        grads = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
        for i in range(micro_batches):
            model.zero_grad()
            mean_loss(model, rows[i::micro_batches], micro_batches, tp.size).backward()
            for name, p in model.named_parameters():
                grads[name] += p.grad
        return gather(tp, arch, grads)


def mean_loss(model, rows, parts, multiple=1):
    """Return the mean loss over the tokens of `rows`, divided by `parts`."""
    tokens, positions, labels, counted = batch(rows, multiple)
    return model(tokens, positions, None, labels=labels).sum() / counted.sum() / parts


def gather(tp, arch, grads):
    """Return HF name -> unsharded tensor, gathered from the ranks' shards."""
    return {name: t.cpu() for name, t in to_hf(arch, grads, lambda name: tp.all_gather(grads[name]))}


def built_before(tp, model_dir, rows):
    """Return the logprobs of sequence-parallel models built before the patch, by name of their config."""
    asked = {
        "nothing": {},
        "fusions": {"bias_dropout_fusion": True, "bias_activation_fusion": True},
        "determinism": {"deterministic_mode": True},
    }
    with megatron(tp), torch.no_grad():
        models = {name: build(model_dir, torch.bfloat16, True, **fields) for name, fields in asked.items()}
        tokens, positions, labels, counted = batch(rows, tp.size)
        with patch_megatron(read_architecture(model_dir).vocab):
            return {name: -model(tokens, positions, None, labels=labels)[counted] for name, model in models.items()}


def stock(tp, model_dir, dtype, rows):
    """Return the logprobs of `rows` from stock Megatron."""
    with megatron(tp), torch.no_grad():
        return torch.cat(recompute(build(model_dir, dtype), as_logprobs(rows), "padded", patched=False))


def train_and_send(tp, model_dir, dtype, rows):
    """Return the logprobs before and after a step of plain SGD, and the weights after it by HF name."""
    from alignkit.megatron.build import hf_weights

    arch = read_architecture(model_dir)
    with megatron(tp), patch_megatron(arch.vocab):
        model = build(model_dir, dtype)
        before = torch.cat(recompute(model, as_logprobs(rows), "padded"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        (-before.mean()).backward()
        optimizer.step()
        with torch.no_grad():
            after = torch.cat(recompute(model, as_logprobs(rows), "padded"))
        return before.detach(), after, dict(hf_weights(model, arch))


def load_and_compute(tp, model_dir, dtype, rows, weights):
    """Return the logprobs of `rows` of a model with other `weights`, given by HF name."""
    from alignkit.convert import to_megatron

    arch = read_architecture(model_dir)
    with megatron(tp), patch_megatron(arch.vocab), torch.no_grad():
        model = build(model_dir, dtype)
        model.load_state_dict(to_megatron(arch, weights, tp_rank=tp.rank, tp_size=tp.size), strict=False)
        return torch.cat(recompute(model, as_logprobs(rows), "padded"))


def entropy_step(tp, model_dir, dtype, rows, temperature):
    """Return HF name -> gradient of the summed entropy at `temperature`, on one rank."""
    arch = read_architecture(model_dir)
    with megatron(tp), patch_megatron(arch.vocab):
        model = build(model_dir, dtype)
        tokens, positions, labels, _ = batch(rows)
        logprobs(
            model, tokens, positions, None, labels, temperature=temperature, return_entropy=True
        ).entropy.sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        return dict(to_hf(arch, grads, lambda name: [grads[name]]))


def disagree(tp, model_dir, rows, what):
    """Run a forward in which rank 1 differs from rank 0 in `what`."""
    odd = tp.rank == 1
    with megatron(tp), patch_megatron(299 if odd and what == "vocab_size" else 300):
        model = build(model_dir, torch.bfloat16)
        tokens, positions, labels, _ = batch(rows[:1] if odd and what == "input_ids" else rows)
        if odd and what == "labels":
            labels = labels.clamp(min=300)
        if odd and what == "MoE":
            model.config.num_moe_experts = 2
        mask = None
        if odd and what == "attention_mask":
            mask = torch.zeros(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool)
        model(tokens, positions, mask, labels=labels)


@contextlib.contextmanager
def _attribute(owner, name, value):
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def _hook(module):
    handle = module.register_forward_hook(lambda module, args, output: [output])
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _in_fp32(model):
    model.float()
    try:
        yield
    finally:
        model.bfloat16()


WRONG = {
    "input_ids float": lambda model, call: call.update(tokens=call["tokens"].float()),
    "input_ids None": lambda model, call: call.update(tokens=None),
    "input_ids empty": lambda model, call: call.update(tokens=call["tokens"][:0]),
    "position_ids": lambda model, call: call.update(position_ids="x"),
    "attention_mask": lambda model, call: call.update(attention_mask="x"),
    "packed_seq_params": lambda model, call: call.update(packed_seq_params="x"),
    "labels None": lambda model, call: call.update(labels=None),
    "labels shape": lambda model, call: call.update(labels=call["labels"].t()),
    "labels value": lambda model, call: call.update(labels=call["labels"] + 1000),
    "temperature None": lambda model, call: call.update(temperature=None),
    "temperature value": lambda model, call: call.update(temperature=0.7),
    "temperature tensor": lambda model, call: call.update(temperature=torch.ones(2, 4)),
    "ignore_index None": lambda model, call: call.update(ignore_index=None),
    "ignore_index value": lambda model, call: call.update(ignore_index=-1),
    "return_entropy": lambda model, call: call.update(return_entropy=True),
    "eps of norms": lambda model, call: _attribute(model.decoder.final_layernorm, "eps", 1e-3),
    "types of parameters": lambda model, call: _in_fp32(model),
    "rotary_pos_emb": lambda model, call: _attribute(model, "rotary_base", 5000.0),
    "recompute_granularity": lambda model, call: _attribute(model.config, "recompute_granularity", "selective"),
    "_forward_mlp of a layer": lambda model, call: _attribute(
        model.decoder.layers[0], "_forward_mlp", model.decoder.layers[0]._forward_mlp
    ),
    "GPTModel._preprocess": lambda model, call: _attribute(type(model), "_preprocess", lambda *args, **kwargs: None),
    "GPTModel._postprocess": lambda model, call: _attribute(type(model), "_postprocess", lambda *args, **kwargs: None),
    "SelfAttention.forward": lambda model, call: _attribute(
        type(model.decoder.layers[0].self_attention), "forward", lambda *args, **kwargs: None
    ),
    "decoder.layers.0: the forward hook": lambda model, call: _hook(model.decoder.layers[0]),
    "decoder.final_layernorm: the forward hook": lambda model, call: _hook(model.decoder.final_layernorm),
}
"""Name, whose first word must be in the error -> change that rank 1 alone makes."""


def wrong_on_one_rank(tp, model_dir, what, changes=WRONG, **options):
    """Run a forward with change `what` of `changes` on rank 1 alone, and check that one without it gives the same bits.

    Args:
        tp: Tensor-parallel group.
        model_dir: HF directory.
        what: Key of `changes`.
        changes: Changes of the model or the call.
        **options: Arguments of `build`.

    Returns:
        Class name and message of the error of the first forward; None if it succeeded.
    """
    with megatron(tp), patch_megatron(300), torch.no_grad():
        model = build(model_dir, torch.bfloat16, **options)
        tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
        right = dict(tokens=tokens, position_ids=None, attention_mask=None, labels=tokens)
        expected = logprobs(model, **right).log_probs
        call, raised = dict(right), None
        with (changes[what](model, call) if tp.rank == 1 else None) or contextlib.nullcontext():
            try:
                logprobs(model, **call)
            except Exception as e:
                raised = type(e).__name__, str(e)
        assert torch.equal(logprobs(model, **right).log_probs, expected)
        return raised


def steps_by_config(tp, model_dir, dtype, sequence_parallel, rows, configs):
    """Return `step` with each of `configs`, by name."""
    return {name: step(tp, model_dir, dtype, sequence_parallel, rows, **config) for name, config in configs.items()}


def optimizer_steps(tp, model_dir, dtype, rows, distributed, overlap, steps=3):
    """Return the losses of `steps` steps of Megatron's Adam.

    With `distributed`, its states are sharded over the data-parallel ranks; with `overlap`, the next forward gathers
    the updated parameters.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    with megatron(tp), patch_megatron(read_architecture(model_dir).vocab):
        model = build(model_dir, dtype)
        ddp = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=overlap,
                use_distributed_optimizer=distributed,
                overlap_param_gather=overlap,
            ),
            model,
        )
        ddp.train()
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                weight_decay=0.0,
                clip_grad=0.0,
                bf16=True,
                params_dtype=dtype,
                use_distributed_optimizer=distributed,
                overlap_param_gather=overlap,
            ),
            [ddp],
        )
        losses = []
        for _ in range(steps):
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            loss = mean_loss(ddp, rows, 1)
            loss.backward()
            finalize_model_grads([ddp])
            assert optimizer.step()[0]
            losses.append(loss.item())
        return losses


def packed(rows, multiple=1, longest=None):
    """Return tokens and labels, ``[1, t]``, and PackedSeqParams of rows padded to multiples of `multiple`."""
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens, labels, starts = [], [], [0]
    for row in rows:
        padding = -(len(row) - 1) % multiple
        tokens += row[:-1] + [0] * padding
        labels += row[1:] + [IGNORE] * padding
        starts.append(len(tokens))
    longest = longest or max(b - a for a, b in itertools.pairwise(starts))
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    return torch.tensor([tokens], device=DEVICE), torch.tensor([labels], device=DEVICE), params


def causal_mask(s):
    return torch.ones(1, 1, s, s, dtype=torch.bool, device=DEVICE).triu(1)


def run_without_synchronization(tp, model_dir, dtype, sequence_parallel, rows, **config):
    """Run two rounds of micro-batches, the second with torch's sync debug mode set to raise at synchronizations.

    The second round has new tensors. `config` has the arguments of `build`.
    """
    multiple = tp.size if sequence_parallel else 1
    with megatron(tp), patch_megatron(read_architecture(model_dir).vocab):
        model = build(model_dir, dtype, sequence_parallel, **config).train()
        for mode in ("default", "error"):
            tokens, positions, labels, _ = batch(rows, multiple)
            mask = causal_mask(tokens.shape[1])
            together, its_labels, params = packed(rows, multiple)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            try:
                for given in (None, mask):
                    model(tokens, positions, given, labels=labels).sum().backward()
                logprobs(
                    model,
                    together,
                    None,
                    None,
                    its_labels,
                    temperature=0.7,
                    return_entropy=True,
                    packed_seq_params=params,
                ).log_probs.sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def wrong_value(model_dir, what):
    """Run a forward on this process's GPU with one invalid value among its inputs."""
    from tests.megatron.gpus import join, tensor_parallel

    join(0, 1, store=torch.distributed.HashStore())
    tp, rows = tensor_parallel(1), [[1, 2, 3, 4, 5], [6, 7, 8]]
    with megatron(tp), patch_megatron(read_architecture(model_dir).vocab), torch.no_grad():
        model = build(model_dir, torch.bfloat16)
        tokens, positions, labels, _ = batch(rows)
        mask, params = causal_mask(tokens.shape[1]), None
        if what == "tokens":
            tokens[0, 1] = read_architecture(model_dir).vocab
        elif what == "mask":
            mask = ~mask
        else:
            tokens, labels, params = packed(rows, longest=3 if what == "max_seqlen" else None)
            positions = mask = None
            if what == "packed":
                params.cu_seqlens_q[-1] -= 1
        model(tokens, positions, mask, labels=labels, packed_seq_params=params)
        torch.cuda.synchronize()
        print("no error")
