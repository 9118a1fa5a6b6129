"""Functions that test_te.py and test_te_cuda.py run on each rank, with `te_on_cpu` or the real TransformerEngine."""

import contextlib
import copy
import multiprocessing
import pickle

import torch

from alignkit.convert import read_architecture
from alignkit.megatron import logprobs, patch_megatron, status
from alignkit.megatron.build import hf_weights
from alignkit.megatron.fingerprint import fingerprint
from tests.megatron import workers

TOKENS = [[1, 2, 3, 4], [5, 6, 7, 8]]


def build(model_dir, sequence_parallel=False, dtype=torch.bfloat16, **config):
    return workers.build(model_dir, dtype, sequence_parallel, transformer_engine=True, **config)


def classes(model):
    return {path: f"{type(m).__module__}.{type(m).__qualname__}" for path, m in model.named_modules()}


def patch_invariants(model):
    """Return what undo must restore: module classes, attribute names, and the types and marks of parameters."""
    attributes = {path: sorted(vars(m)) for path, m in model.named_modules()}
    marks = {
        name: (type(p).__name__, p.dtype, *(getattr(p, mark, None) for mark in MARKS))
        for name, p in model.named_parameters()
    }
    return classes(model), attributes, marks


MARKS = ("sequence_parallel", "tensor_model_parallel", "partition_dim", "partition_stride", "allreduce")
"""Attributes that Megatron sets on parameters; undo must restore them."""


def assert_same_state(a, b):
    """Assert that two state dicts have equal entries under the same names, in the same order."""
    assert list(a) == list(b)
    for name in a:
        same = torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else a[name] is None is b[name]
        assert same and (a[name] is None or a[name].dtype == b[name].dtype), name


def losses(model, rows, multiple=1):
    tokens, positions, labels, counted = workers.batch(rows, multiple)
    with torch.no_grad():
        return model(tokens, positions, None, labels=labels.clamp(min=0))[counted]


def patch_and_undo(tp, model_dir, sequence_parallel, rows, **config):
    """Patch and undo the patch of one model, and check its state dict and attributes in both states.

    Returns:
        The `status` while patched, and the losses before the patch, while patched and after undo.
    """
    vocab, multiple = read_architecture(model_dir).vocab, tp.size
    with workers.megatron(tp):
        model = build(model_dir, sequence_parallel, **config)
        keys = [name for name in model.state_dict() if name.endswith("_extra_state")]
        assert any("linear_qkv" in key for key in keys) and any("core_attention" in key for key in keys)
        before = losses(model, rows, multiple)
        seen, state = patch_invariants(model), copy.deepcopy(model.state_dict())
        with patch_megatron(vocab) as handle:
            aligned = losses(model, rows, multiple)
            report = status(model)
            assert patch_invariants(model)[1:] == (seen[1] | {"": sorted(vars(model))}, seen[2])
            assert_same_state(model.state_dict(), state)
            names = {path: type(module).__name__ for path, module in model.named_modules()}
            assert names == {path: name.rpartition(".")[2] for path, name in seen[0].items()}, (
                "the patch must keep class names, by which weight converters identify modules"
            )
        assert not handle.names
        assert patch_invariants(model) == seen
        assert_same_state(model.state_dict(), state)
        return report, before, aligned, losses(model, rows, multiple)


def check_copies(tp, model_dir, rows):
    """Check that copies of an aligned model are aligned when they run and stock after undo."""
    with workers.megatron(tp):
        model = build(model_dir)
        stock = classes(model)
        with patch_megatron(read_architecture(model_dir).vocab):
            aligned = losses(model, rows)
            used, unused = workers.deep_copy(model), workers.deep_copy(model)
            assert torch.equal(losses(used, rows), aligned)
            pickled = pickle.dumps(model.decoder.final_layernorm)
            assert type(pickle.loads(pickled)).__module__.startswith("transformer_engine.")
        expected = losses(model, rows)
        for copied in (used, unused):
            assert classes(copied) == stock
            assert torch.equal(losses(copied, rows), expected)


def sharded(model):
    """Return the sharded state dict, and the metadata of each entry without its values."""
    from megatron.core.parallel_state import get_data_parallel_group

    group = get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    fields = ("key", "global_shape", "global_offset", "dtype", "replica_id")
    return state, {
        name: (type(value).__name__, *(getattr(value, field, None) for field in fields))
        for name, value in state.items()
    }


def save(state, folder):
    """Save a distributed checkpoint from a test process.

    Megatron's writer starts a process, which daemonic processes such as the tests' ranks may not.
    """
    from megatron.core import dist_checkpointing

    config = multiprocessing.current_process()._config
    config["daemon"] = False
    try:
        dist_checkpointing.save(state, folder)
    finally:
        config["daemon"] = True


def cross_load_checkpoints(tp, model_dir, folder, rows, **config):
    """Load stock checkpoints aligned, and aligned ones stock; return the checkpoint keys of the TE and local spec."""
    from megatron.core import dist_checkpointing

    vocab = read_architecture(model_dir).vocab
    with workers.megatron(tp):
        model, other = build(model_dir, **config), build(model_dir, **config)
        local = workers.build(model_dir, torch.bfloat16, **config)
        state, stock = sharded(model)
        weights = copy.deepcopy(model.state_dict())
        save(state, folder / "stock")
        with patch_megatron(vocab):
            expected = losses(model, rows)
            state, aligned = sharded(model)
            assert aligned == stock
            save(state, folder / "aligned")
            losses(other, rows)
            zero_parameters(other)
            other.load_state_dict(dist_checkpointing.load(sharded(other)[0], folder / "stock"))
            assert_same_state(other.state_dict(), weights)
            assert torch.equal(losses(other, rows), expected)
        zero_parameters(other)
        other.load_state_dict(dist_checkpointing.load(sharded(other)[0], folder / "aligned"))
        assert_same_state(other.state_dict(), weights)
        return [
            sorted(v[0] for k, v in entries.items() if "_extra_state" not in k)
            for entries in (stock, sharded(local)[1])
        ]


def zero_parameters(model):
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()


def exported_weights(tp, model_dir):
    """Return the weights by HF name, and the fingerprint of the model."""
    with workers.megatron(tp):
        model = build(model_dir)
        weights = dict(hf_weights(model, read_architecture(model_dir)))
        return weights, fingerprint(model, model_dir).tensors


def steps_without_and_with_fusion(tp, model_dir, rows, sequence_parallel=False):
    """Return `workers.step` without and with ``gradient_accumulation_fusion``.

    Megatron's own linear layers need Apex for it, so the test overrides that check.
    """
    from megatron.core.tensor_parallel import layers

    available = layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available = True
    try:
        return [
            workers.step(
                tp,
                model_dir,
                torch.bfloat16,
                sequence_parallel,
                rows,
                transformer_engine=True,
                gradient_accumulation_fusion=fusion,
                micro_batches=2,
                overlap=True,
            )
            for fusion in (False, True)
        ]
    finally:
        layers._grad_accum_fusion_available = available


@contextlib.contextmanager
def _set_attribute(module, name, value):
    before, had = vars(module).get(name), name in vars(module)
    vars(module)[name] = value
    try:
        yield
    finally:
        vars(module).pop(name)
        if had:
            vars(module)[name] = before


@contextlib.contextmanager
def _replaced_child(parent, name, module):
    before = getattr(parent, name)
    setattr(parent, name, module)
    try:
        yield
    finally:
        setattr(parent, name, before)


@contextlib.contextmanager
def _adapter(model):
    """Register a parameter on a submodule that the aligned parent does not run."""
    inside = next(iter(model.decoder.layers[0].self_attention.core_attention.children()))
    inside.register_parameter("lora", torch.nn.Parameter(torch.zeros(1)))
    try:
        yield
    finally:
        del inside.lora


def _subclass(module):
    from alignkit.megatron import modules

    module = copy.copy(module)
    module.__class__ = type("QuantLinear", (modules.stock_class(type(module)),), {})
    return module


def _autocast():
    from transformer_engine.pytorch.fp8 import fp8_autocast

    return fp8_autocast(enabled=True)


def _set_at(name, value, path="decoder.layers.1.self_attention.linear_qkv"):
    return lambda model: _set_attribute(model.get_submodule(path), name, value)


UNSUPPORTED = {
    "fp8_autocast": lambda model: _autocast(),
    "primary_weights_in_fp8": _set_at("primary_weights_in_fp8", True),
    "te_quant_params": _set_at("te_quant_params", object()),
    "te_return_bias": _set_at("te_return_bias", True),
    "linear_qkv.zero_centered_gamma": _set_at("zero_centered_gamma", True),
    "final_layernorm.zero_centered_gamma": _set_at("zero_centered_gamma", True, "decoder.final_layernorm"),
    "normalization": _set_at("normalization", "LayerNorm"),
    "return_layernorm_output": _set_at("return_layernorm_output", True),
    "weight_names": _set_at("weight_names", ["q_weight", "kv_weight"]),
    "parallel_mode": _set_at("parallel_mode", None, "decoder.layers.0.mlp.linear_fc2"),
    "softmax_type": _set_at("softmax_type", "learnable", "decoder.layers.0.self_attention.core_attention"),
    "attn_mask_type": _set_at("attn_mask_type", "no_mask", "decoder.layers.0.self_attention.core_attention"),
    "return_max_logit": _set_at("return_max_logit", True, "decoder.layers.0.self_attention.core_attention"),
    "tp_group": _set_at("tp_group", None),
    "forward": _set_at("forward", print),
    "bias": _set_at("bias", torch.zeros(2), "decoder.layers.1.mlp.linear_fc1"),
    "must not have parameters": _adapter,
    "QuantLinear": lambda model: _replaced_child(
        model.decoder.layers[0].mlp, "linear_fc2", _subclass(model.decoder.layers[0].mlp.linear_fc2)
    ),
}
"""Error text -> change that the last rank alone makes."""

FIELDS = {
    "fp8": "hybrid",
    "fp4": "e2m1",
    "fp8_param": True,
    "fp4_param": True,
    "fp8_dot_product_attention": True,
    "tp_comm_overlap": True,
    "use_te_activation_func": True,
    "use_transformer_engine_op_fuser": True,
    "fused_residual_rmsnorm": True,
    "symmetric_ar_type": "two_shot",
    "quant_recipe": object(),
    "delay_wgrad_compute": True,
    "layernorm_zero_centered_gamma": True,
}
"""Config field -> unsupported value that the last rank alone sets. The error must contain the field's name."""


def errors_by_change(tp, model_dir):
    """Make each change of `UNSUPPORTED` and set each config field of `FIELDS` on the last rank alone.

    After each change is undone, the bits must be the original ones.

    Returns:
        The names of all changes, and name -> error of this rank's forward.
    """
    with workers.megatron(tp), patch_megatron(read_architecture(model_dir).vocab), torch.no_grad():
        model = build(model_dir)
        tokens = torch.tensor(TOKENS, device=workers.DEVICE)
        expected = logprobs(model, tokens, None, None, tokens).log_probs
        fields = {name: value for name, value in FIELDS.items() if hasattr(model.config, name)}
        kinds = {name: how for name, how in UNSUPPORTED.items() if name != "tp_group" or tp.size > 1}
        wrong = kinds | {
            name: lambda model, n=name, v=v: _set_attribute(model.config, n, v) for name, v in fields.items()
        }
        raised = {}
        for name, how in wrong.items():
            with how(model) if tp.rank == tp.size - 1 else contextlib.nullcontext():
                try:
                    logprobs(model, tokens, None, None, tokens)
                except Exception as e:
                    raised[name] = type(e).__name__, str(e)
            assert torch.equal(logprobs(model, tokens, None, None, tokens).log_probs, expected), name
        return list(wrong), raised


def attention_dropout(tp, model_dir):
    """Run in evaluation mode, which is accepted, then in training, which must raise."""
    with workers.megatron(tp), patch_megatron(300):
        model = build(model_dir, attention_dropout=0.1)
        tokens = torch.tensor(TOKENS, device=workers.DEVICE)
        model(tokens, None, None)
        model.train()(tokens, None, None)
