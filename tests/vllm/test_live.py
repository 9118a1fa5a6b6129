"""Detection of replaced methods, modules, hooks and values, before a real vLLM engine is built and while it runs.

The next step must stop the engine with an error that names the part. alignkit/vllm/live.py holds the texts.
"""

import re

import pytest

from alignkit.errors import UnsupportedError
from alignkit.vllm import epochs
from tests.vllm.conftest import ENGINE

SMALL = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 256, "vocab": 512}
PROMPT = [5, 100, 33, 511, 0, 41, 7, 7]
STEPS = 64
"""Steps per request, enough to check every part of the small model twice."""


@pytest.fixture(scope="module")
def engine(vllm_process, checkpoint):
    process = vllm_process()
    process(start, checkpoint(**SMALL), {})
    return process


@pytest.fixture(scope="module")
def processed(vllm_process, checkpoint):
    process = vllm_process()
    process(start, checkpoint(**SMALL), {"logprobs_mode": "processed_logprobs"})
    return process


@pytest.fixture(scope="module")
def spare(vllm_process):
    return vllm_process()


# Functions that run in the engine's process.


def start(state, model, options):
    from vllm import LLM

    from alignkit.vllm import patch_vllm

    patch_vllm()
    state.llm = LLM(model, dtype="bfloat16", **ENGINE | {"max_model_len": 128} | options)


def generate(state):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, detokenize=False, logprobs=0)
    (output,) = state.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return [step[t].logprob for t, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)]


def first_error(state):
    """Return the error that stops the engine, or None, and the number of steps until then."""
    steps, execute = 0, worker(state).model_runner.execute_model

    def counted(*args, **kwargs):
        nonlocal steps
        steps += 1
        return execute(*args, **kwargs)

    worker(state).model_runner.execute_model = counted
    try:
        generate(state)
        return None, steps
    except UnsupportedError as e:  # spare the tests a new engine
        for request in list(state.llm.llm_engine.output_processor.request_states):
            state.llm.llm_engine.abort_request([request], True)
        epochs.of(state.llm.llm_engine.vllm_config).stopped = None
        return str(e), steps
    finally:
        del worker(state).model_runner.execute_model


def worker(state):
    return state.llm.llm_engine.model_executor.driver_worker.worker


def status(state):
    from alignkit.vllm import worker_status

    return worker_status(state.llm)[0]


def with_replaced_part(state, replace):
    """Replace a part and report the engine's reaction.

    Returns:
        The error that stops the engine, the number of steps, the status, and the error of `apply_model`. Then, with the
        part restored: whether the logprobs are as before, and whether the status is patched.
    """
    before, model = generate(state), worker(state).model_runner.get_model()
    restore = replace(state, model)
    try:
        (stopped, steps), seen = first_error(state), status(state)
        try:
            state.llm.apply_model(lambda model: None)
            applied = None
        except UnsupportedError as e:
            applied = str(e)
    finally:
        restore()
    return stopped, steps, seen, applied, generate(state) == before, status(state)["patched"]


def with_replaced_casts(state):
    """Replace the cast methods of all modules, as importing TransformerEngine does.

    Returns:
        The error that stops the engine, and whether the status is patched.
    """
    import torch

    restores = [set_attribute(torch.nn.Module, name, lambda self: self) for name in ("float", "half", "bfloat16")]
    try:
        return first_error(state)[0], status(state)["patched"]
    finally:
        for restore in restores:
            restore()


def inner_sampler(state, model):
    last = worker(state).model_runner.sampler.topk_topp_sampler
    return set_attribute(last.sampler, "forward", lambda logits, *args: (logits.argmax(-1), logits * 2))


def outer_sampler(state, model):
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    part = worker(state).model_runner.sampler
    ours, part.topk_topp_sampler = part.topk_topp_sampler, TopKTopPSampler("processed_logprobs")
    return lambda: setattr(part, "topk_topp_sampler", ours)


def statuses_with_changed_values(state):
    """Return the status with each of several values changed, which steps do not check, and after restoring all."""
    model = worker(state).model_runner.get_model()
    seen = []
    for owner, name, value in (
        (model.model.norm, "variance_epsilon", 1e-3),
        (model.logits_processor, "scale", 0.5),
        (model.logits_processor, "soft_cap", 5.0),
        (model.model.layers[0].self_attn.attn.impl, "scale", 1.0),
    ):
        restore = set_attribute(owner, name, value)
        seen.append(status(state).get("replaced", ""))
        restore()
    return seen, status(state)["patched"]


def set_attribute(owner, name, value):
    """Set an attribute and return a function that restores it."""
    own = any(name in vars(owner).get(held, ()) for held in ("_modules", "_parameters")) or name in vars(owner)
    old = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, old) if own else delattr(owner, name)


def sampler(state, model):
    from vllm.v1.sample.sampler import Sampler

    return set_attribute(worker(state).model_runner, "sampler", Sampler("raw_logprobs"))


def logprobs_of_the_sampler(state, model):
    return set_attribute(worker(state).model_runner.sampler, "compute_logprobs", lambda logits: logits.log_softmax(-1))


def norm(state, model):
    from vllm.model_executor.layers.layernorm import RMSNorm

    part = model.model.layers[1].input_layernorm
    ours, part.__class__ = type(part), RMSNorm
    return lambda: setattr(part, "__class__", ours)


def module(state, model):
    import torch

    class Doubled(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args):
            return self.inner(*args)

    mlp = model.model.layers[0].mlp
    ours = mlp.act_fn
    mlp.act_fn = Doubled(ours)
    return lambda: setattr(mlp, "act_fn", ours)


def forward_of_a_module(state, model):
    layer = model.model.layers[1].mlp.down_proj
    return set_attribute(layer, "forward", lambda x: type(layer).forward(layer, x * 2))


def method_of_our_class(state, model):
    from vllm.model_executor.layers.layernorm import RMSNorm

    from alignkit.vllm.layers import AlignedRMSNorm

    return set_attribute(AlignedRMSNorm, "forward", RMSNorm.forward_native)


def method_added_to_our_class(state, model):
    import torch

    from alignkit.vllm.layers import AlignedSiluAndMul

    return set_attribute(AlignedSiluAndMul, "_call_impl", lambda self, x: torch.nn.Module._call_impl(self, x * 2))


def method_of_vllms_class(state, model):
    import functools

    from vllm.model_executor.models.qwen3 import Qwen3Attention

    stock = Qwen3Attention.forward

    @functools.wraps(stock)
    def forward(self, positions, hidden_states):
        return stock(self, positions, hidden_states) * 2

    return set_attribute(Qwen3Attention, "forward", forward)


def hook(state, model):
    return model.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: output * 2).remove


def hook_before(state, model):
    return model.logits_processor.register_forward_pre_hook(lambda module, args: (args[0], args[1] * 2)).remove


def global_hook(state, model):
    import torch

    return torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None).remove


def linear_method(state, model):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class Mine(UnquantizedLinearMethod):
        def apply(self, layer, x, bias=None):
            return x @ layer.weight.T

    return set_attribute(model.model.layers[1].self_attn.qkv_proj, "quant_method", Mine())


def attention(state, model):
    impl = model.model.layers[1].self_attn.attn.impl
    return set_attribute(impl, "forward", lambda layer, q, k, v, cache, meta, output, **rest: output.zero_())


def attention_registered(state, model):
    context = worker(state).vllm_config.compilation_config.static_forward_context
    first, second = (layer.self_attn.attn.layer_name for layer in model.model.layers)
    ours, context[second] = context[second], context[first]
    return lambda: context.update({second: ours})


def head(state, model):
    return cut(model.lm_head.weight)


def rotary_table(state, model):
    return cut(model.model.layers[0].self_attn.rotary_emb.cos_sin_cache)


def cut(tensor):
    """Drop rows of a tensor and return a function that restores them."""
    whole, tensor.data = tensor.data, tensor.data[:448]
    return lambda: setattr(tensor, "data", whole)


def unnoticed_tensors(state):
    """Return the parameters and rotary tables whose shape or dtype can change without being named by the status."""
    model, unnoticed = worker(state).model_runner.get_model(), []
    tables = [(name, t) for name, t in model.named_buffers() if name.endswith("cos_sin_cache")]
    for name, tensor in [*model.named_parameters(), *tables]:
        whole = tensor.data
        for other in (whole[:-1], whole[..., :-1], whole.double()):
            tensor.data = other
            named = name.rpartition(".")[2] if "routed_experts.w" in name else f"{name}: must be "
            if named not in status(state).get("replaced", ""):
                unnoticed.append((name, other.dtype, other.shape))
        tensor.data = whole
    return unnoticed, len(tables), status(state)["patched"]


PARTS = {
    sampler: "sampler: must be AlignedSampler, got Sampler",
    logprobs_of_the_sampler: "sampler: compute_logprobs: must be AlignedSampler's method, got an attribute",
    norm: r"model.layers.1.input_layernorm \(RMSNorm\)",
    module: r"model.layers.0.mlp.act_fn \(Doubled\)",
    forward_of_a_module: "model.layers.1.mlp.down_proj: forward: must be AlignedRowParallelLinear's method",
    method_of_our_class: "AlignedRMSNorm.forward: must be the method that alignkit defines, got ",
    method_added_to_our_class: "AlignedSiluAndMul._call_impl: must be the method that alignkit defines, got ",
    method_of_vllms_class: "Qwen3Attention.forward: must be the method that vllm defines, got ",
    hook: "model.layers.0.self_attn: must have only forward hooks of vLLM or alignkit, got hook.<locals>.<lambda>",
    hook_before: "logits_processor: must have only forward hooks",
    global_hook: "torch.nn.Module: must have only global forward hooks of vLLM or alignkit, got global_hook",
    linear_method: "model.layers.1.self_attn.qkv_proj: quant_method: must be AlignedLinearMethod, got Mine",
    attention: "impl.forward: must be AlignedAttentionImpl's method, got an attribute",
    head: r"lm_head.weight: must be bfloat16 \[512, 128\] according to config.json, got bfloat16 \[448, 128\]",
    rotary_table: r"rotary_emb.cos_sin_cache: must be float32 \[4096, 32\] .*, got float32 \[448, 32\]",
    attention_registered: "static_forward_context: must map this layer's name to the model's attention layer",
}


@pytest.mark.parametrize("replace", PARTS, ids=lambda f: f.__name__)
def test_a_running_engine_stops_when_a_part_is_replaced(engine, replace):
    stopped, steps, seen, applied, as_before, patched = engine(with_replaced_part, replace)
    assert stopped is not None and steps < (1 if replace in (hook, hook_before, global_hook) else STEPS)
    for text in (stopped, applied, seen["replaced"]):
        assert re.search(PARTS[replace], text), text
    assert seen["patched"] is False and "contract" not in seen
    assert as_before and patched


def test_replaced_module_casts_are_accepted(engine):
    assert engine(with_replaced_casts) == (None, True)


@pytest.mark.parametrize(
    "replace, text",
    [
        (outer_sampler, "sampler.topk_topp_sampler: must be ProcessedLogprobs, got TopKTopPSampler"),
        (inner_sampler, "sampler.topk_topp_sampler.sampler: forward: must be a method of TopKTopPSampler, got "),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_replaced_sampler_of_processed_logprobs_stops_the_engine(processed, replace, text):
    stopped, steps, seen, _, as_before, patched = processed(with_replaced_part, replace)
    assert text in stopped and text in seen["replaced"] and steps == 0
    assert as_before and patched


def test_status_names_changed_values(engine):
    seen, patched = engine(statuses_with_changed_values)
    for text, name in zip(seen, ("rms_norm_eps", "logit_scale", "logits soft cap", "attention scale"), strict=True):
        assert f"{name}: must be" in text
    assert patched


def test_status_names_a_tensor_of_another_shape_or_dtype(engine):
    assert engine(unnoticed_tensors) == ([], 1, True)


@pytest.mark.parametrize("arch", ["glm4_moe", "qwen2_moe"])
def test_status_names_a_tensor_of_another_shape_or_dtype_in_a_moe_model(vllm_process, checkpoint, arch):
    process = vllm_process()
    process(start, checkpoint(arch, **SMALL), {})
    assert process(unnoticed_tensors) == ([], 1, True)


# Replacements before the engine is built.


def start_error(state, model, replace):
    """Return the error of an engine that starts after `replace`, or None."""
    restore = replace(state, None)
    try:
        start(state, model, {})
        return None
    except UnsupportedError as e:
        return str(e)
    finally:
        restore()


@pytest.mark.parametrize("replace", [method_of_vllms_class, method_of_our_class], ids=lambda f: f.__name__)
def test_a_method_replaced_before_the_engine_starts_is_rejected(spare, checkpoint, replace):
    assert re.search(PARTS[replace], spare(start_error, checkpoint(**SMALL), replace))


def test_a_step_check_costs_microseconds(engine):
    assert engine(step_check_seconds) < 1e-4


def step_check_seconds(state):
    """Return the time of a step's check in seconds, the minimum of 5 repeats."""
    import timeit

    return min(timeit.repeat(worker(state)._watch.step, number=100, repeat=5)) / 100


def attention_class_names(state):
    """Return the names of `qwen3.Qwen3Attention` inside and outside of `aligned_layers`.

    The cases are: all aligned layers, none, some, and the error if another plugin has replaced the class.
    """
    from vllm.model_executor.models import qwen3

    from alignkit.vllm.layers import aligned_layers

    stock, seen = qwen3.Qwen3Attention, []

    def record_name():
        seen.append(qwen3.Qwen3Attention.__name__)

    with aligned_layers():
        record_name()
    record_name()
    with aligned_layers(("RMSNorm", "RotaryEmbedding")):
        record_name()
    qwen3.Qwen3Attention = type("Mine", (stock,), {})
    try:
        with aligned_layers():
            record_name()
    except UnsupportedError as e:
        seen.append(str(e))
    record_name()
    qwen3.Qwen3Attention = stock
    return seen


def test_model_classes_are_replaced_only_while_a_model_is_built(spare):
    reason = "Qwen3Attention: already replaced by another vLLM plugin. Disable that plugin"
    assert spare(attention_class_names) == ["AlignedQwen3Attention", "Qwen3Attention", "Qwen3Attention", reason, "Mine"]


def fused_and_separate_logprobs(state):
    """Return the number of fused calls, and the logprobs with fused and with separate norms and RoPE."""
    from vllm.model_executor.models.qwen3 import Qwen3Attention

    from alignkit.ops import library
    from alignkit.vllm.layers import NormedAttention

    calls, ours, op = [], NormedAttention.forward, library.qk_norm_rope
    library.qk_norm_rope = lambda *args: calls.append(len(args)) or op(*args)
    try:
        one = generate(state)
    finally:
        library.qk_norm_rope = op
    watch = worker(state)._watch
    watch.step = lambda: None  # the check would report the replaced method
    NormedAttention.forward = Qwen3Attention.forward
    try:
        return len(calls), one, generate(state)
    finally:
        NormedAttention.forward = ours
        del watch.step


def test_the_fused_qk_norm_rope_keeps_the_bits(engine):
    calls, one, two = engine(fused_and_separate_logprobs)
    assert calls == 2 * STEPS and one == two  # one call per layer and step
