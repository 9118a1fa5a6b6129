"""Parts of an engine that are replaced, before it is built or while it runs."""

import re

import pytest

from alignkit.errors import UnsupportedError
from tests.vllm.conftest import ENGINE

SMALL = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 256, "vocab": 512}
PROMPT = [5, 100, 33, 511, 0, 41, 7, 7]
STEPS = 64
"""Enough for two rounds of looking at all parts of the small model."""


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


# What runs in the engine's process.


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


def first_refusal(state):
    """What stops the engine, and after how many steps."""
    steps, execute = 0, worker(state).model_runner.execute_model

    def counted(*args, **kwargs):
        nonlocal steps
        steps += 1
        return execute(*args, **kwargs)

    worker(state).model_runner.execute_model = counted
    try:
        generate(state)
        return None, steps
    except UnsupportedError as e:
        for request in list(state.llm.llm_engine.output_processor.request_states):
            state.llm.llm_engine.abort_request([request], True)
        return str(e), steps
    finally:
        del worker(state).model_runner.execute_model


def worker(state):
    return state.llm.llm_engine.model_executor.driver_worker.worker


def status(state):
    from alignkit.vllm import worker_status

    return worker_status(state.llm)[0]


def exchanged(state, replace):
    """With a part replaced: what stops the engine, its status, and what is refused of an `apply_model`. Then, with the
    part put back, whether the engine says what it said before."""
    before, model = generate(state), worker(state).model_runner.get_model()
    put_back = replace(state, model)
    try:
        (stopped, steps), seen = first_refusal(state), status(state)
        try:
            state.llm.apply_model(lambda model: None)
            applied = None
        except UnsupportedError as e:
            applied = str(e)
    finally:
        put_back()
    return stopped, steps, seen, applied, generate(state) == before, status(state)["patched"]


def cast_by_another(state):
    """What stops the engine, and whether it says that it is patched, once all modules are cast by other functions, as they are when
    TransformerEngine is imported."""
    import torch

    put_back = [setting(torch.nn.Module, name, lambda self: self) for name in ("float", "half", "bfloat16")]
    try:
        return first_refusal(state)[0], status(state)["patched"]
    finally:
        for back in put_back:
            back()


def inner_sampler(state, model):
    last = worker(state).model_runner.sampler.topk_topp_sampler
    return setting(last.sampler, "forward", lambda logits, *args: (logits.argmax(-1), logits * 2))


def last_sampler(state, model):
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    part = worker(state).model_runner.sampler
    ours, part.topk_topp_sampler = part.topk_topp_sampler, TopKTopPSampler("processed_logprobs")
    return lambda: setattr(part, "topk_topp_sampler", ours)


def values(state):
    """Status with each of some values changed, which steps do not look at, and with all as they were."""
    model = worker(state).model_runner.get_model()
    seen = []
    for owner, name, value in (
        (model.model.norm, "variance_epsilon", 1e-3),
        (model.logits_processor, "scale", 0.5),
        (model.logits_processor, "soft_cap", 5.0),
        (model.model.layers[0].self_attn.attn.impl, "scale", 1.0),
    ):
        put_back = setting(owner, name, value)
        seen.append(status(state).get("replaced", ""))
        put_back()
    return seen, status(state)["patched"]


def setting(owner, name, value):
    """Sets it; what is returned puts it back."""
    own = any(name in vars(owner).get(held, ()) for held in ("_modules", "_parameters")) or name in vars(owner)
    old = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, old) if own else delattr(owner, name)


def sampler(state, model):
    from vllm.v1.sample.sampler import Sampler

    return setting(worker(state).model_runner, "sampler", Sampler("raw_logprobs"))


def logprobs_of_the_sampler(state, model):
    return setting(worker(state).model_runner.sampler, "compute_logprobs", lambda logits: logits.log_softmax(-1))


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
    return setting(layer, "forward", lambda x: type(layer).forward(layer, x * 2))


def method_of_our_class(state, model):
    from vllm.model_executor.layers.layernorm import RMSNorm

    from alignkit.vllm.layers import AlignedRMSNorm

    return setting(AlignedRMSNorm, "forward", RMSNorm.forward_native)


def method_added_to_our_class(state, model):
    import torch

    from alignkit.vllm.layers import AlignedSiluAndMul

    return setting(AlignedSiluAndMul, "_call_impl", lambda self, x: torch.nn.Module._call_impl(self, x * 2))


def method_of_vllms_class(state, model):
    import functools

    from vllm.model_executor.models.qwen3 import Qwen3Attention

    stock = Qwen3Attention.forward

    @functools.wraps(stock)
    def forward(self, positions, hidden_states):
        return stock(self, positions, hidden_states) * 2

    return setting(Qwen3Attention, "forward", forward)


def hook(state, model):
    return model.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: output * 2).remove


def hook_before(state, model):
    return model.logits_processor.register_forward_pre_hook(lambda module, args: (args[0], args[1] * 2)).remove


def hook_of_all(state, model):
    import torch

    return torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None).remove


def linear_method(state, model):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class Mine(UnquantizedLinearMethod):
        def apply(self, layer, x, bias=None):
            return x @ layer.weight.T

    return setting(model.model.layers[1].self_attn.qkv_proj, "quant_method", Mine())


def attention(state, model):
    impl = model.model.layers[1].self_attn.attn.impl
    return setting(impl, "forward", lambda layer, q, k, v, cache, meta, output, **rest: output.zero_())


def attention_registered(state, model):
    context = worker(state).vllm_config.compilation_config.static_forward_context
    first, second = (layer.self_attn.attn.layer_name for layer in model.model.layers)
    ours, context[second] = context[second], context[first]
    return lambda: context.update({second: ours})


PARTS = {
    sampler: "sampler: logprobs by Sampler",
    logprobs_of_the_sampler: "sampler: compute_logprobs is replaced",
    norm: r"model.layers.1.input_layernorm \(RMSNorm\)",
    module: r"model.layers.0.mlp.act_fn \(Doubled\)",
    forward_of_a_module: "model.layers.1.mlp.down_proj: forward is replaced",
    method_of_our_class: "AlignedRMSNorm.forward is replaced",
    method_added_to_our_class: "AlignedSiluAndMul._call_impl is replaced",
    method_of_vllms_class: "Qwen3Attention.forward is replaced",
    hook: "model.layers.0.self_attn: forward hook hook.<locals>.<lambda>",
    hook_before: "logits_processor: forward hook",
    hook_of_all: "forward hook of all modules",
    linear_method: "model.layers.1.self_attn.qkv_proj: computed by Mine",
    attention: "forward of its attention is replaced",
    attention_registered: "another module is registered",
}


@pytest.mark.parametrize("replace", PARTS, ids=lambda f: f.__name__)
def test_a_part_replaced_in_a_running_engine(engine, replace):
    stopped, steps, seen, applied, as_before, patched = engine(exchanged, replace)
    assert stopped is not None and steps < STEPS
    for text in (stopped, applied, seen["replaced"]):
        assert re.search(PARTS[replace], text), text
    assert seen["patched"] is False and "contract" not in seen
    assert as_before and patched


def test_modules_are_cast_by_another(engine):
    assert engine(cast_by_another) == (None, True)


@pytest.mark.parametrize(
    "replace, text",
    [
        (last_sampler, "sampler.topk_topp_sampler: logprobs by TopKTopPSampler"),
        (inner_sampler, "sampler.topk_topp_sampler.sampler: its forward is replaced"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_sampler_of_processed_logprobs(processed, replace, text):
    stopped, steps, seen, _, as_before, patched = processed(exchanged, replace)
    assert text in stopped and text in seen["replaced"] and steps == 0
    assert as_before and patched


def test_values_that_config_json_does_not_have(engine):
    seen, patched = engine(values)
    for text, name in zip(
        seen, ("rms_norm_eps", "logit_scale", "a soft cap of the logits", "the scale of attention"), strict=True
    ):
        assert f"{name} (" in text
    assert patched


# Before it is built.


def built(state, model, replace):
    """The error of an engine made after `replace`."""
    put_back = replace(state, None)
    try:
        start(state, model, {})
        return None
    except UnsupportedError as e:
        return str(e)
    finally:
        put_back()


@pytest.mark.parametrize("replace", [method_of_vllms_class, method_of_our_class], ids=lambda f: f.__name__)
def test_a_method_replaced_before_the_engine_is_made(spare, checkpoint, replace):
    assert re.search(PARTS[replace], spare(built, checkpoint(**SMALL), replace))


def test_a_look_costs_microseconds(engine):
    assert engine(cost) < 1e-4


def cost(state):
    """Seconds of a step's look, the fastest of some."""
    import timeit

    return min(timeit.repeat(worker(state)._watch.step, number=100, repeat=5)) / 100


def in_files(state):
    """Which class a model's file has by the name `Qwen3Attention` when models are built of alignkit's layers, of some
    and of none, and what is said where another has put in one of its own."""
    from vllm.model_executor.models import qwen3

    from alignkit.vllm.layers import aligned_layers

    stock, seen = qwen3.Qwen3Attention, []

    def look():
        seen.append(qwen3.Qwen3Attention.__name__)

    with aligned_layers():
        look()
    look()
    with aligned_layers(("RMSNorm", "RotaryEmbedding")):
        look()
    qwen3.Qwen3Attention = type("Mine", (stock,), {})
    try:
        with aligned_layers():
            look()
    except UnsupportedError as e:
        seen.append(str(e))
    look()
    qwen3.Qwen3Attention = stock
    return seen


def test_a_class_of_a_models_file_is_exchanged_while_a_model_is_built(spare):
    refused = "Qwen3Attention: already replaced by another vLLM plugin"
    assert spare(in_files) == ["AlignedQwen3Attention", "Qwen3Attention", "Qwen3Attention", refused, "Mine"]


def one_op_and_two(state):
    """Logprobs of the engine as it is, and with the norms and the rotation as vLLM calls them."""
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
    watch.step = lambda: None  # it would find the replaced method
    NormedAttention.forward = Qwen3Attention.forward
    try:
        return len(calls), one, generate(state)
    finally:
        NormedAttention.forward = ours
        del watch.step


def test_norms_and_rotation_in_one_op_change_no_bit(engine):
    calls, one, two = engine(one_op_and_two)
    assert calls == 2 * STEPS and one == two  # a call a layer and step
