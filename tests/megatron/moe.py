"""Functions that the MoE tests run on each rank, with real Megatron-core: test_moe.py, test_moe_cuda.py, test_te.py.

The ranks unpickle them by name. layouts.py provides the process groups, workers.py the calls of dense models.
"""

import contextlib
import re
import zlib

import torch

from alignkit.convert import read_architecture
from alignkit.dist import TP
from alignkit.jobs.train import recompute
from alignkit.megatron import logprobs, patch_megatron, status
from alignkit.megatron.build import gpt_model, hf_weights, whole
from alignkit.megatron.modules import expert_ranks
from alignkit.models.config import Architecture
from tests.megatron import workers
from tests.megatron.layouts import layout
from tests.megatron.te_workers import save

MODES = ("one", "padded", "packed")


def build(model_dir, dtype, sequence_parallel=False, **config):
    return gpt_model(model_dir, dtype, sequence_parallel=sequence_parallel, **config)


def own_rows(rows):
    """Return this data-parallel rank's rows."""
    from megatron.core import parallel_state

    return rows[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]


def all_calls(_, model_dir, dtype, rows, how, sequence_parallel=False, **config):
    """Return `workers.all_calls` of this rank's rows, and their indices in `rows`."""
    from megatron.core import parallel_state

    with layout(**how):
        mine = own_rows(rows)
        tp = TP(parallel_state.get_tensor_model_parallel_group())
        return workers.all_calls(tp, model_dir, dtype, sequence_parallel, mine, **config), [rows.index(r) for r in mine]


def stock(_, model_dir, dtype, rows, how, sequence_parallel=False):
    """Return the logprobs of this rank's rows from stock Megatron, padded."""
    with layout(**how), torch.no_grad():
        model = build(model_dir, dtype, sequence_parallel)
        given = workers.as_logprobs(own_rows(rows))
        return torch.cat(recompute(model, given, "padded", patched=False))


def step(_, model_dir, dtype, rows, how, sequence_parallel=False, patched=True, bare=False, packed=True, **config):
    """Run a backward pass of the mean loss over the rows of all ranks.

    Args:
        model_dir: HF directory.
        dtype: Model type.
        rows: Token lists of all ranks.
        how: Arguments of `layouts.layout`.
        sequence_parallel: Use sequence parallelism.
        patched: Patch Megatron.
        bare: Return the model's own gradients, without Megatron's DDP; for dense weights they are this rank's alone.
        packed: Pack the rows of a rank, instead of padding them.
        **config: Fields of the TransformerConfig.

    Returns:
        HF name -> unsharded gradient, and the experts of this rank's tokens, bool [MoE layers, tokens, experts].
    """
    from megatron.core import distributed

    arch = read_architecture(model_dir)
    chosen = []
    with layout(**how), patch_megatron(arch.vocab) if patched else contextlib.nullcontext():
        model = build(model_dir, dtype, sequence_parallel, **config)
        for router in (layer.mlp.router for layer in model.decoder.layers if hasattr(layer.mlp, "router")):
            router.register_forward_hook(lambda module, given, output: chosen.append(output[1].detach()))
        ddp = model
        if not bare:
            ddp = distributed.DistributedDataParallel(
                model.config, distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
            )
            ddp.zero_grad_buffer()
        ddp.train()
        mine = own_rows(rows)
        multiple = how.get("tp", 1)
        if packed:
            tokens, labels, params = workers.packed(mine, multiple)
        else:
            tokens, _, labels, _ = workers.batch(mine, multiple)
            params = None
        mask = None if packed else workers.causal_mask(tokens.shape[1])
        losses = ddp(tokens, None, mask, labels=labels, packed_seq_params=params)
        ranks = len(rows) // len(mine)
        counted = sum(len(row) - 1 for row in rows)
        loss = losses[labels != workers.IGNORE].sum() / counted * (1 if bare else ranks)
        loss.backward()
        if not bare:
            distributed.finalize_model_grads([ddp])
        grads = {name: p.grad if bare else p.main_grad for name, p in model.named_parameters()}
        return {name: t.cpu() for name, t in whole(model, arch, grads)}, torch.stack(chosen)


def training_logprobs(_, model_dir, dtype, rows, **fields):
    """Return the logprobs of `rows`, padded, of a model in training mode."""
    with layout(), patch_megatron(300):
        model = build(model_dir, dtype, **fields).train()
        return torch.cat(recompute(model, workers.as_logprobs(rows), "padded")).detach()


def expert_bias_step(_, model_dir, dtype, rows, fields):
    """Run a step that updates the expert bias.

    Returns:
        Per layer, the counted tokens of each expert; per layer, the bias after the step; the experts of each token
        during the step and after it.
    """
    from megatron.core import distributed

    chosen, counts = [], []
    with layout(), patch_megatron(300):
        model = build(model_dir, dtype, **fields)
        routers = [layer.mlp.router for layer in model.decoder.layers]
        for router in routers:
            router.register_forward_hook(lambda module, given, output: chosen.append(output[1].detach()))
        ddp = distributed.DistributedDataParallel(model.config, distributed.DistributedDataParallelConfig(), model)
        ddp.train()
        for _ in range(2):
            tokens, labels, params = workers.packed(rows)
            losses = ddp(tokens, None, None, labels=labels, packed_seq_params=params)
            if not counts:
                losses.sum().backward()
                counts = [router.local_tokens_per_expert.clone() for router in routers]
                distributed.finalize_model_grads([ddp])
        biases = [router.expert_bias.clone() for router in routers]
        return counts, biases, torch.stack(chosen[: len(routers)]), torch.stack(chosen[len(routers) :])


def whole_weights(_, model_dir, dtype, how):
    """Return HF name -> unsharded weight, gathered from the ranks."""
    with layout(**how):
        return dict(hf_weights(build(model_dir, dtype), read_architecture(model_dir)))


def _wrong_field(model, call):
    return workers._attribute(model.config, "moe_latent_size", 64)


@contextlib.contextmanager
def _hook(module):
    handle = module.register_forward_hook(lambda module, given, output: None)
    try:
        yield
    finally:
        handle.remove()


WRONG = {
    "moe_latent_size": _wrong_field,
    "moe_router_topk": lambda model, call: workers._attribute(model.config, "moe_router_topk", 3),
    "moe_shared_expert_gate": lambda model, call: workers._attribute(model.config, "moe_shared_expert_gate", True),
    "input_ids": lambda model, call: call.update(tokens=call["tokens"] + 300),
    "labels": lambda model, call: call.update(labels=call["labels"] + 300),
    "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1: the hook": lambda model, call: _hook(
        model.decoder.layers[0].mlp.experts.local_experts[1].linear_fc1
    ),
    "decoder.layers.0.mlp.router.topk": lambda model, call: workers._attribute(
        model.decoder.layers[0].mlp.router, "topk", 3
    ),
}
"""Error text, up to a colon -> change that rank 1 alone makes."""


def wrong_on_one_rank(tp, model_dir, how):
    """Return this rank's error for each change of `WRONG` on rank 1; undoing the change must restore the bits."""
    with layout(**how), patch_megatron(300), torch.no_grad():
        model = build(model_dir, torch.bfloat16)
        own = [1, 2, 3, 4, 5] if how.get("tp") == 2 else [1, 2, 3, 4, 5][tp.rank :]
        tokens = torch.tensor([own], device=workers.DEVICE)
        right = dict(tokens=tokens, position_ids=None, attention_mask=None, labels=tokens)
        expected = logprobs(model, **right).log_probs
        raised = {}
        for what, wrong in WRONG.items():
            call = dict(right)
            with (wrong(model, call) if tp.rank == 1 else None) or contextlib.nullcontext():
                try:
                    logprobs(model, **call)
                except Exception as e:
                    raised[what] = type(e).__name__, str(e)
            assert torch.equal(logprobs(model, **right).log_probs, expected), what
        return raised


def save_checkpoint(_, model_dir, dtype, how, folder):
    """Write a distributed checkpoint of an aligned model and return the keys of its state dict."""
    with layout(**how), patch_megatron(300):
        model = build(model_dir, dtype)
        names = list(model.state_dict())
        save(_sharded(model), folder)
        return names


def load_checkpoint(_, model_dir, dtype, how, folder):
    """Load a distributed checkpoint into an aligned model and return its weights by HF name."""
    from megatron.core import dist_checkpointing

    with layout(**how), patch_megatron(300):
        model = build(model_dir, dtype)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        state = _sharded(model)
        model.load_state_dict(dist_checkpointing.load(state, folder))
        return dict(hf_weights(model, read_architecture(model_dir)))


def _sharded(model):
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group})


def patch_and_undo(_, model_dir, dtype, rows):
    """Patch and undo the patch of one model.

    Returns:
        Stock logprobs before the patch, aligned logprobs, stock logprobs after undo, two bools: undo restored the
        modules' classes, and the patch changed them; and the aligned modules from `status`.
    """
    with layout(), torch.no_grad():
        model = build(model_dir, dtype)
        given = workers.as_logprobs(rows)

        def stock():
            return torch.cat(recompute(model, given, "padded", patched=False))

        def classes():
            return [type(module) for module in model.modules()]

        before, classes_before = stock(), classes()
        with patch_megatron(300):
            between = torch.cat(recompute(model, given, "padded"))
            aligned = status(model)["aligned"]
            classes_between = classes()
        return before, between, stock(), classes_before == classes(), classes_before != classes_between, aligned


def dense_and_moe_model(how, sequence_parallel, dtype, **fields):
    """Build a model of a dense layer and an MoE layer with a shared expert, narrower than the dense MLP.

    A weight's values depend only on its name, so the unsharded weights are the same in every layout.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from alignkit.megatron.build import _sequence_parallel_norms, transformer_config

    arch = Architecture("qwen3_moe", 2, 128, 4, 2, 32, 64, 512, 64, 1e-6, 1e4, False, None, 8, 2, True)
    tp, ep, etp = how.get("tp", 1), how.get("ep", 1), how.get("etp", how.get("tp", 1))
    usual = dict(
        ffn_hidden_size=256,
        moe_layer_freq=[0, 1],
        moe_shared_expert_intermediate_size=192,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    config = transformer_config(arch, dtype, tp=tp, sequence_parallel=sequence_parallel, **(usual | fields))
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    with _sequence_parallel_norms() if sequence_parallel else contextlib.nullcontext():
        model = GPTModel(config, spec, vocab_size=512, max_sequence_length=64, position_embedding_type="rope")
    ranks = expert_ranks(model)
    for name, p in model.to(workers.DEVICE, dtype).named_parameters():
        group = ranks[0] if ".experts." in name else TP(model.pg_collection.tp)
        whole = re.sub(r"local_experts\.(\d+)", lambda m: f"local_experts.{int(m[1]) + 8 // ep * ranks[1].rank}", name)
        cut = 0 if re.search("fc1|qkv|embedding|output_layer", name) else 1 if re.search("fc2|proj", name) else None
        shape = [n * group.size if i == cut else n for i, n in enumerate(p.shape)]
        values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(whole.encode())))
        values = 0.1 * values + (1 if len(shape) == 1 else 0)
        parts = values.chunk(2) if "fc1" in name else [values]
        mine = [part if cut is None else part.chunk(group.size, cut)[group.rank] for part in parts]
        p.data.copy_(torch.cat(mine))
    return model


def dense_and_moe_logprobs(_, rows, how, sequence_parallel, dtype, patched=True, **fields):
    """Return the logprobs of this rank's rows from `dense_and_moe_model`, and their indices in `rows`."""
    with layout(**how), patch_megatron(512) if patched else contextlib.nullcontext(), torch.no_grad():
        mine = own_rows(rows)
        model = dense_and_moe_model(how, sequence_parallel, dtype, **fields).eval()
        values = recompute(model, workers.as_logprobs(mine), "padded", patched=patched)
        return torch.cat(values), [rows.index(row) for row in mine]


def dense_and_moe_gradients(_, rows, dtype, patched, **fields):
    """Return name -> gradient on one rank; without vocabulary padding, the stock loss is the same."""
    with layout(), patch_megatron(512) if patched else contextlib.nullcontext():
        model = dense_and_moe_model({}, False, dtype, **fields).train()
        tokens, _, labels, counted = workers.batch(rows)
        mask = workers.causal_mask(tokens.shape[1])
        model(tokens, None, mask, labels=labels.clamp(min=0))[counted].mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}
