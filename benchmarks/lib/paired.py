"""Worker of `before_after.py`: ``python paired.py`` with one checkout of alignkit on PYTHONPATH.

The parent writes JSON lines to standard input, and reads one JSON line per request from the original standard output.
A request is a case (the first time, it builds the case), its number of calls and whether to time the device. The reply
is ``{"host_us", "device_us"}``, or ``{"error"}``. The worker uses public names of alignkit alone, so that it runs on
any two checkouts that have them.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch

from alignkit import ops

HIDDEN = (896, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120)
EPS = 1e-6
CACHE_BLOCK = 16
CYCLES = 2000
"""schedule: cycles of `torch.cuda._sleep` per microsecond, at least the clock of an H200."""


class Draw:
    """Seeded sizes and tensors of one case: equal in every worker."""

    def __init__(self, name: str, device: torch.device, longest: int):
        self.rng, self.device, self.longest = random.Random(name), device, longest
        torch.manual_seed(self.rng.getrandbits(40))

    def rows(self) -> int:
        """Return a number of rows, log-uniform in [1, longest]."""
        return round(self.longest ** self.rng.random())

    def hidden(self) -> int:
        return self.rng.choice([size for size in HIDDEN if size <= max(self.longest, HIDDEN[0])])

    def floats(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.device) * std

    def ids(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, device=self.device)


Case = tuple[Callable[..., object], list[torch.Tensor]]
"""A call and its leading arguments, which receive gradients in a backward case."""


def _linear(draw: Draw, op=ops.linear) -> Case:
    k = draw.hidden()
    n = draw.rng.choice((k, 3 * k // 2 // 64 * 64, 4 * k))
    return op, [draw.floats(draw.rows(), k), draw.floats(n, k, std=0.02)]


def _row_parallel(draw: Draw) -> Case:
    return _linear(draw, ops.row_parallel_linear)


def _rms_norm(draw: Draw) -> Case:
    rows, width = draw.rows(), draw.hidden()
    tensors = [draw.floats(rows, width), draw.floats(width), draw.floats(rows, width)]
    if draw.rng.random() < 0.5:
        return lambda x, weight: ops.rms_norm(x, weight, EPS), tensors[:2]
    return lambda x, weight, residual: ops.rms_norm(x, weight, EPS, residual), tensors


def _heads(draw: Draw) -> tuple[int, int, int]:
    kv = draw.rng.choice((2, 4, 8))
    return kv * draw.rng.choice((1, 2, 4, 7)), kv, draw.rng.choice((64, 128))


def _rope(draw: Draw) -> Case:
    rows, (heads, _, size) = draw.rows(), _heads(draw)
    table, positions = ops.rope_table(size, 4096, 1e4, draw.device), draw.ids(4096, rows)
    return lambda x: ops.rope(x, positions, table), [draw.floats(rows, heads, size)]


def _qk_norm_rope(draw: Draw) -> Case:
    rows, (heads, kv, size) = draw.rows(), _heads(draw)
    table, positions = ops.rope_table(size, 4096, 1e4, draw.device), draw.ids(4096, rows)
    weights = draw.floats(size), draw.floats(size)
    return (
        lambda q, k, a, b: ops.qk_norm_rope(q, k, a, b, EPS, positions, table),
        [draw.floats(rows, heads, size), draw.floats(rows, kv, size), *weights],
    )


def _silu_mul(draw: Draw) -> Case:
    return ops.silu_mul, [draw.floats(draw.rows(), 8 * draw.hidden())]


def _sigmoid_mul(draw: Draw) -> Case:
    rows, width = draw.rows(), draw.hidden()
    return ops.sigmoid_mul, [draw.floats(rows, 1).float(), draw.floats(rows, width)]


def _bit_sums(draw: Draw) -> Case:
    width = draw.hidden()
    weights = draw.ids(1 << 62, width)
    return lambda x: ops.bit_sums(x, weights), [draw.floats(draw.rows(), width)]


def _packed(draw: Draw) -> tuple[int, torch.Tensor]:
    """Return the rows of 1 to 4 sequences, and cu_seqlens."""
    lengths = [draw.rows() for _ in range(draw.rng.randint(1, 4))]
    return sum(lengths), torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(draw.device)


def _cached(draw: Draw) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a number of sequences with a new token each, their slots, first rows and lengths."""
    batch = draw.rng.choice((1, 4, 16))
    integers = torch.arange(batch + 1, dtype=torch.int32, device=draw.device)
    return batch, integers[:-1], integers, draw.ids(draw.longest, batch).to(torch.int32) + 2


def _short_conv(draw: Draw) -> Case:
    (rows, starts), channels = _packed(draw), 2 * draw.hidden()
    return lambda x, w: ops.short_conv(x, w, starts), [draw.floats(rows, channels), draw.floats(channels, 4)]


def _paged_short_conv(draw: Draw) -> Case:
    (batch, slots, starts, lens), channels = _cached(draw), 2 * draw.hidden()
    weight, state = draw.floats(channels, 4), draw.floats(batch, 3, channels)
    return lambda x: ops.paged_short_conv(x, weight, state, slots, starts, lens), [draw.floats(batch, channels)]


def _l2_norm(draw: Draw) -> Case:
    return lambda x: ops.l2_norm(x, EPS), [draw.floats(draw.rows(), 16, 128)]


def _delta_gates(draw: Draw) -> Case:
    rows = draw.rows()
    return ops.delta_gates, [*(draw.floats(rows, 32) for _ in range(2)), *(draw.floats(32) for _ in range(2))]


def _gated_rms_norm(draw: Draw) -> Case:
    rows = draw.rows()
    tensors = [draw.floats(rows, 32, 128), draw.floats(128), draw.floats(rows, 32, 128)]
    return lambda x, weight, gate: ops.gated_rms_norm(x, weight, gate, EPS), tensors


def _delta_rows(draw: Draw, rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return q, k and v of 16 and 32 heads of 128, then g and beta."""
    keys = [torch.nn.functional.normalize(draw.floats(rows, 16, 128), dim=-1) for _ in range(2)]
    gates = -draw.floats(rows, 32).float().exp(), draw.floats(rows, 32).float().sigmoid()
    return [*keys, draw.floats(rows, 32, 128)], [*gates]


def _delta_rule(draw: Draw) -> Case:
    rows, starts = _packed(draw)
    tensors, gates = _delta_rows(draw, rows)
    return lambda q, k, v: ops.delta_rule(q, k, v, *gates, starts), tensors


def _paged_delta_rule(draw: Draw) -> Case:
    batch, slots, starts, lens = _cached(draw)
    tensors, gates = _delta_rows(draw, batch)
    pages = torch.zeros(batch, 32, ops.delta_page_words(128, 128, torch.bfloat16), device=draw.device)
    return lambda q, k, v: ops.paged_delta_rule(q, k, v, *gates, pages, slots, starts, lens), tensors


def _attention(draw: Draw) -> Case:
    heads, kv, size = _heads(draw)
    rows, starts = _packed(draw)
    tensors = [draw.floats(rows, h, size) for h in (heads, kv, kv)]
    return lambda q, k, v: ops.attention(q, k, v, starts), tensors


def _decode(draw: Draw) -> Case:
    heads, kv, size = _heads(draw)
    lengths = [draw.rows() for _ in range(draw.rng.choice((1, 4, 16)))]
    blocks = [-(-length // CACHE_BLOCK) for length in lengths]
    order = torch.randperm(sum(blocks), dtype=torch.int32)
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for i, mine in enumerate(order.split(blocks)):
        table[i, : blocks[i]] = mine
    keys, values = (draw.floats(sum(blocks), CACHE_BLOCK, kv, size) for _ in range(2))
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=draw.device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=draw.device)
    table = table.to(draw.device)
    return lambda q: ops.paged_attention(q, keys, values, table, starts, seq_lens), [
        draw.floats(len(lengths), heads, size)
    ]


def _head(draw: Draw) -> Case:
    rows, width, vocab = draw.rows(), draw.hidden(), draw.rng.choice((2000, 32000)) if draw.longest > 64 else 500
    target = draw.ids(vocab, rows)
    return (
        lambda x, weight: ops.linear_logp(x, weight, target),
        [draw.floats(rows, width), draw.floats(vocab, width, std=0.02)],
    )


def _head_logits(draw: Draw) -> Case:
    width = draw.hidden()
    return ops.head_logits, [draw.floats(draw.rows(), width), draw.floats(4000, width, std=0.02)]


def _logits(draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocab = min(draw.rows(), 512), draw.rng.choice((2000, 32000))
    return draw.floats(rows, vocab).float(), draw.ids(vocab, rows)


def _log_softmax(draw: Draw) -> Case:
    return ops.log_softmax, [_logits(draw)[0]]


def _logp_from_logits(draw: Draw) -> Case:
    logits, target = _logits(draw)
    return lambda x: ops.logp_from_logits(x, target), [logits]


def _token_logp(draw: Draw) -> Case:
    logits, target = _logits(draw)
    return lambda x: ops.token_logp(x, target[:, None]), [logits]


def _router(draw: Draw) -> Case:
    experts = draw.rng.choice((32, 64, 128))
    return lambda x: ops.moe_router(x, 8)[1], [draw.floats(draw.rows(), experts).float()]


def _experts(draw: Draw) -> Case:
    rows, width, experts = draw.rows(), min(draw.hidden(), 2048), draw.rng.choice((16, 64))
    inner = draw.rng.choice((256, 768))
    weights, ids = torch.softmax(torch.randn(rows, experts, device=draw.device), -1).topk(4)
    return (
        lambda x, gate_up, down: ops.moe_experts(x, ids, weights, gate_up, down),
        [
            draw.floats(rows, width),
            draw.floats(experts, 2 * inner, width, std=0.02),
            draw.floats(experts, width, inner, std=0.02),
        ],
    )


FORWARD = {
    "linear": _linear,
    "row_parallel_linear": _row_parallel,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "qk_norm_rope": _qk_norm_rope,
    "silu_mul": _silu_mul,
    "sigmoid_mul": _sigmoid_mul,
    "bit_sums": _bit_sums,
    "short_conv": _short_conv,
    "paged_short_conv": _paged_short_conv,
    "l2_norm": _l2_norm,
    "delta_gates": _delta_gates,
    "gated_rms_norm": _gated_rms_norm,
    "delta_rule": _delta_rule,
    "paged_delta_rule": _paged_delta_rule,
    "attention": _attention,
    "paged_attention": _decode,
    "linear_logp": _head,
    "head_logits": _head_logits,
    "log_softmax": _log_softmax,
    "logp_from_logits": _logp_from_logits,
    "token_logp": _token_logp,
    "moe_router": _router,
    "moe_experts": _experts,
}
"""Ops; a case is the forward under torch.no_grad()."""
BACKWARD = (
    "linear",
    "row_parallel_linear",
    "rms_norm",
    "rope",
    "qk_norm_rope",
    "silu_mul",
    "sigmoid_mul",
    "short_conv",
    "l2_norm",
    "delta_gates",
    "gated_rms_norm",
    "attention",
    "linear_logp",
    "logp_from_logits",
    "moe_experts",
)
"""Ops of which a case is forward and backward too."""


def op_case(name: str, device: torch.device, longest: int) -> Callable[[], object]:
    """Return the call of an op's case ``OP forward INDEX`` or ``OP training INDEX``."""
    op, kind, _ = name.split()
    call, tensors = FORWARD[op](Draw(name, device, longest))
    if kind == "forward":
        return torch.no_grad()(lambda: call(*tensors))
    leaves = [t.requires_grad_() for t in tensors]
    with torch.no_grad():
        first = call(*tensors)
    outputs = first if isinstance(first, tuple) else (first,)
    grads = [torch.randn_like(out) for out in outputs]

    def step():
        out = call(*leaves)
        return torch.autograd.grad(out if isinstance(out, tuple) else (out,), leaves, grads)

    return step


def training_case(model: str) -> Callable[[], object]:
    """Return a training step of Megatron-core's GPTModel, whose weights are those of the directory `model`."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    from alignkit.convert import read_architecture
    from alignkit.megatron import cpu, patch_megatron
    from alignkit.megatron.build import gpt_model

    gpu = torch.cuda.is_available()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    with cpu.cpu_host():
        parallel_state.initialize_model_parallel()
        if gpu:
            tensor_parallel.model_parallel_cuda_manual_seed(0)
        vocab = read_architecture(model).vocab
        patch_megatron(vocab)
        network = gpt_model(model).train()
        device = next(network.parameters()).device
        tokens, labels = (torch.randint(vocab, (2, 256), device=device) for _ in range(2))
        positions = torch.arange(256, device=device).expand(2, 256)

        def step():
            network.zero_grad(set_to_none=True)
            network(tokens, positions, None, labels=labels).float().mean().backward()

        step()  # patches the model, within cpu_host
    return step


def rollout_case(model: str) -> Callable[[], object]:
    """Return a rollout of vLLM: 16 prompts of 32 tokens, 32 sampled tokens each, with their logprobs."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from alignkit.vllm import patch_vllm

    patch_vllm()
    import vllm

    if torch.cuda.is_available():
        options = {"kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.1}
    else:
        options = {"enforce_eager": True}
    llm = vllm.LLM(
        model, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=128, enable_prefix_caching=False, **options
    )
    prompts = [{"prompt_token_ids": [(17 * i + j) % 500 + 1 for j in range(32)]} for i in range(16)]
    params = vllm.SamplingParams(max_tokens=32, ignore_eos=True, logprobs=0, detokenize=False, seed=0)
    return lambda: llm.generate(prompts, params, use_tqdm=False)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _seconds(run: Callable, calls: int, after: Callable[[], None] = lambda: None) -> list[float]:
    """Return the seconds of each call of `run`, each with `after`."""
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        run()
        after()
        times.append(time.perf_counter() - began)
    return times


def _host_us(run: Callable, calls: int) -> float:
    """Return the microseconds in which one call returns, without waiting for the device between calls.

    It is the lower quartile of the calls: other load on the machine only lengthens a call.
    """
    times = _seconds(run, calls)
    _wait()
    return 1e6 * statistics.quantiles(times, n=4)[0]


def _device_us(run: Callable, calls: int, host_us: float) -> float:
    """Return the median microseconds on the GPU, whose queue is filled before the call starts."""
    marks = []
    for _ in range(calls):
        torch.cuda._sleep(int(min(3 * host_us + 50, 20_000) * CYCLES))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        _wait()
        marks.append(1e3 * start.elapsed_time(end))
    return statistics.median(marks)


def _whole_us(run: Callable, calls: int) -> float:
    """Return the median microseconds of one call with a synchronization after it."""
    return 1e6 * statistics.median(_seconds(run, calls, _wait))


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines log to standard output
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    built = {}
    gc.disable()
    for line in sys.stdin:
        request = json.loads(line)
        name = request["case"]
        try:
            if name not in built:
                built.clear()
                if "model" in request:
                    make = training_case if name == "training" else rollout_case
                    built[name] = make(request["model"])
                else:
                    built[name] = op_case(name, device, request["longest"])
                for _ in range(3):
                    built[name]()
                _wait()
            run = built[name]
            if "model" in request:
                reply = {"host_us": _whole_us(run, request["calls"])}
            else:
                reply = {"host_us": _host_us(run, request["calls"])}
                if device.type == "cuda":
                    reply["device_us"] = _device_us(run, request["calls"], reply["host_us"])
        except Exception as e:  # the parent reports it and drops the case
            reply = {"error": f"{type(e).__name__}: {str(e)[:300]}"}
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
