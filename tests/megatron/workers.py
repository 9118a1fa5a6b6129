"""What the tests run on each tensor-parallel rank; all with real Megatron-core."""
import contextlib

import torch

from alignkit.check.train import recompute
from alignkit.convert import read_architecture, to_hf
from alignkit.drift.files import Logprobs
from alignkit.megatron import logprobs, patch_megatron
from alignkit.megatron.cpu import cpu_host

IGNORE = -100


@contextlib.contextmanager
def megatron(tp):
    """Megatron's process groups over all ranks of `tp`, on a CPU."""
    from megatron.core import parallel_state

    with cpu_host():
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp.size)
        yield


def build(model_dir, dtype, sequence_parallel=False, **overrides):
    from alignkit.megatron.build import gpt_model

    return gpt_model(model_dir, dtype, sequence_parallel=sequence_parallel, **overrides)


def as_logprobs(rows):
    """Token lists as a set of sequences whose prompt is the first token."""
    return Logprobs([row[:1] for row in rows], [row[1:] for row in rows],
                    [torch.zeros(len(row) - 1) for row in rows], "none")


def batch(rows, multiple=1):
    """tokens, positions, labels ``[b, s]`` of rows padded on the right, and which labels count."""
    s = max(map(len, rows)) - 1
    s += -s % multiple
    tokens = torch.zeros(len(rows), s, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORE)
    for i, row in enumerate(rows):
        tokens[i, :len(row) - 1], labels[i, :len(row) - 1] = torch.tensor(row[:-1]), torch.tensor(row[1:])
    return tokens, torch.arange(s).expand_as(tokens), labels, labels != IGNORE


def every_way(tp, model_dir, dtype, sequence_parallel, rows):
    """The logprobs of `rows` by every way there is to ask for them, fp32, rows one after the other."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    vocab = read_architecture(model_dir).vocab
    with megatron(tp), patch_megatron(vocab), torch.no_grad():
        model = build(model_dir, dtype, sequence_parallel)
        given = as_logprobs(rows)
        result = {mode: torch.cat(recompute(model, given, mode)) for mode in ("one", "padded", "packed")}
        tokens, positions, labels, counted = batch(rows, tp.size if sequence_parallel else 1)
        result["loss call"] = -model(tokens, positions, None, labels=labels)[counted]
        logits = model(tokens, positions, None)
        assert logits.dtype == torch.float32
        result["logits"] = -vocab_parallel_cross_entropy(logits, labels)[counted]
        for temperature in (1.0, 0.7):
            asked = logprobs(model, tokens, positions, None, labels, temperature=temperature,
                             return_entropy=True)
            result[f"logprobs at {temperature}"] = asked.log_probs[counted]
            result[f"entropy at {temperature}"] = asked.entropy[counted]
        result["logits at 0.7"] = -vocab_parallel_cross_entropy(logits / 0.7, labels)[counted]
    return result


def step(tp, model_dir, dtype, sequence_parallel, rows):
    """One backward of the mean loss under Megatron's DDP and its reductions: loss, HF name -> gradient."""
    from megatron.core import distributed

    arch = read_architecture(model_dir)
    with megatron(tp), patch_megatron(arch.vocab):
        model = build(model_dir, dtype, sequence_parallel)
        ddp = distributed.DistributedDataParallel(
            model.config, distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        ddp.train()
        ddp.zero_grad_buffer()
        tokens, positions, labels, counted = batch(rows, tp.size if sequence_parallel else 1)
        loss = ddp(tokens, positions, None, labels=labels).sum() / counted.sum()
        loss.backward()
        distributed.finalize_model_grads([ddp])
        grads = {name: p.main_grad for name, p in model.named_parameters()}
        return loss.item(), dict(to_hf(arch, grads, lambda name: tp.all_gather(grads[name])))


def built_before(tp, model_dir, rows):
    """Logprobs of sequence-parallel models built before the patch, by what was asked of their configuration."""
    asked = {"nothing": {}, "fusions": {"bias_dropout_fusion": True, "bias_activation_fusion": True},
             "determinism": {"deterministic_mode": True}}
    with megatron(tp), torch.no_grad():
        models = {name: build(model_dir, torch.bfloat16, True, **fields) for name, fields in asked.items()}
        tokens, positions, labels, counted = batch(rows, tp.size)
        with patch_megatron(read_architecture(model_dir).vocab):
            return {name: -model(tokens, positions, None, labels=labels)[counted] for name, model in models.items()}


def stock(tp, model_dir, dtype, rows):
    """The logprobs of `rows` by Megatron as it comes."""
    with megatron(tp), torch.no_grad():
        return torch.cat(recompute(build(model_dir, dtype), as_logprobs(rows), "padded", patched=False))


def train_and_send(tp, model_dir, dtype, rows):
    """Logprobs before and after a step of plain SGD, and the weights after it by HF name."""
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
    """The logprobs of `rows` on this rank with other `weights` (HF names)."""
    from alignkit.convert import to_megatron

    arch = read_architecture(model_dir)
    with megatron(tp), patch_megatron(arch.vocab), torch.no_grad():
        model = build(model_dir, dtype)
        model.load_state_dict(to_megatron(arch, weights, tp_rank=tp.rank, tp_size=tp.size), strict=False)
        return torch.cat(recompute(model, as_logprobs(rows), "padded"))


def entropy_step(tp, model_dir, dtype, rows, temperature):
    """HF name -> gradient of the summed entropy at `temperature`, on one rank."""
    arch = read_architecture(model_dir)
    with megatron(tp), patch_megatron(arch.vocab):
        model = build(model_dir, dtype)
        tokens, positions, labels, _ = batch(rows)
        logprobs(model, tokens, positions, None, labels, temperature=temperature,
                 return_entropy=True).entropy.sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        return dict(to_hf(arch, grads, lambda name: [grads[name]]))


def disagree(tp, model_dir, rows, what):
    """A forward in which rank 1 differs from rank 0 in `what`."""
    odd = tp.rank == 1
    with megatron(tp), patch_megatron(299 if odd and what == "vocab_size" else 300):
        model = build(model_dir, torch.bfloat16)
        tokens, positions, labels, _ = batch(rows[:1] if odd and what == "input_ids" else rows)
        if odd and what == "target":
            labels = labels.clamp(min=300)
        if odd and what == "MoE":
            model.config.num_moe_experts = 2
        mask = None
        if odd and what == "attention_mask":
            mask = torch.zeros(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool)
        model(tokens, positions, mask, labels=labels)
