"""`alignkit serve` with real vLLM on a CPU: completions over HTTP, and options that are not served.

Completions must have the bits of an engine in process. A rejected request must leave the server running.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from alignkit.errors import BackendError, UnsupportedError
from alignkit.runtime.ids import contract_id
from tests.vllm.conftest import ENGINE, ENV
from tests.vllm.test_live import SMALL

PROMPT = [5, 100, 33, 511, 0, 41, 7, 7]
OPTIONS = [
    "--enforce-eager",
    "--max-model-len",
    "128",
    "--max-num-seqs",
    "4",
    "--block-size",
    "32",
    "--kv-cache-memory-bytes",
    str(16 << 20),
    "--dtype",
    "bfloat16",
]


@pytest.fixture(scope="module")
def model(checkpoint):
    """Return a small checkpoint with a word-level tokenizer, which the server needs for the text of logprobs."""
    return with_tokenizer(checkpoint(**SMALL), SMALL["vocab"])


def with_tokenizer(model, vocab):
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = Path(model)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return str(path)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with serving(model, OPTIONS, tmp_path_factory.mktemp("server") / "log", ENV) as address:
        yield address


@contextmanager
def serving(model, options, log, env):
    """Yield the address of a server that loads no vLLM plugins."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    env = os.environ | env | {"VLLM_PLUGINS": "", "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "alignkit.cli",
                "serve",
                model,
                *options,
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ],
            stdout=out,
            stderr=out,
            env=env,
        )
    try:
        deadline = time.monotonic() + 200
        while not is_healthy(address):
            assert process.poll() is None and time.monotonic() < deadline, errors(log.read_text())
            time.sleep(0.5)
        yield address
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def errors(log):
    """Return the lines of a server log that mention errors, the cause first, and the end of the log."""
    found = [line for line in log.splitlines() if "Error" in line]
    return "\n".join([*found[:40], "...", log[-4000:]])


def is_healthy(address):
    try:
        return urllib.request.urlopen(f"{address}/health", timeout=5).status == 200
    except (urllib.error.URLError, OSError):
        return False


def post(address, body):
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=120))


def complete(server, model, prompt=PROMPT, **params):
    return answer(server, model, prompt, **params)["choices"][0]


def answer(server, model, prompt=PROMPT, **params):
    return post(
        f"{server}/v1/completions",
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": 12,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            **params,
        },
    )


def in_process(state, model):
    """Return greedy tokens and logprobs of an aligned engine without a server."""
    from vllm import LLM, SamplingParams

    from alignkit.vllm import patch_vllm

    with patch_vllm():
        state.llm = LLM(model, dtype="bfloat16", **ENGINE | {"max_model_len": 128})
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=0)
        (answer,) = state.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    tokens = list(answer.outputs[0].token_ids)
    return tokens, [step[t].logprob for t, step in zip(tokens, answer.outputs[0].logprobs, strict=True)]


def test_a_completion_has_the_bits_of_an_aligned_engine(server, model, vllm_process):
    choice = complete(server, model, temperature=0.0)
    assert (choice["token_ids"], choice["logprobs"]["token_logprobs"]) == vllm_process()(in_process, model)


def test_server_workers_are_aligned(server):
    (worker,) = post(f"{server}/collective_rpc", {"method": "alignkit_status"})["results"]
    assert worker["patched"] and worker["contract"] == contract_id("cpu")
    assert worker["modules"]["AlignedRowParallelLinear"] == 4


def test_a_rejected_request_gets_the_reason_and_the_server_survives(server, model):
    with pytest.raises(urllib.error.HTTPError) as error:
        complete(server, model, structured_outputs={"regex": "a"})
    assert error.value.code == 400 and "structured outputs" in error.value.read().decode()
    assert complete(server, model)["token_ids"]


def test_an_update_over_http_needs_no_reset_and_answers_have_epochs(server, model, checkpoint):
    prompt = [i * 7 % SMALL["vocab"] for i in range(96)]
    before = complete(server, model, prompt, temperature=0.0)
    for epoch, path in ((1, checkpoint(**SMALL, seed=5)), (2, model)):
        post(f"{server}/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        after = answer(server, model, prompt, temperature=0.0)
        fresh = complete(server, model, prompt, temperature=0.0, cache_salt=f"uncached {epoch}")
        assert after["choices"][0]["logprobs"]["token_logprobs"] == fresh["logprobs"]["token_logprobs"]
        assert (after["choices"][0]["token_ids"] == before["token_ids"]) == (epoch == 2)
        identity = after["kv_transfer_params"]["alignkit"]
        assert identity["contract"] == contract_id("cpu") and identity["epochs"] == {"0": [[0, epoch]]}


@pytest.mark.slow
def test_replicas_behind_one_front_end_match_one_engine(checkpoint, vllm_process, tmp_path):
    """The default of vLLM is one front end per replica."""
    model = with_tokenizer(checkpoint("qwen3_moe", **SMALL), SMALL["vocab"])
    options = [*OPTIONS, "--data-parallel-size", "2", "--enable-expert-parallel"]
    with serving(model, options, tmp_path / "log", ENV) as address, ThreadPoolExecutor(4) as pool:
        choices = list(pool.map(lambda _: complete(address, model, temperature=0.0), range(4)))
    expected = vllm_process()(in_process, model)
    for choice in choices:
        assert (choice["token_ids"], choice["logprobs"]["token_logprobs"]) == expected


# Rejections.


def run_server(state, arguments):
    from alignkit.vllm.serve import serve

    serve(arguments)


def test_unsupported_options_are_not_served(vllm_process, model):
    process = vllm_process()
    with pytest.raises(UnsupportedError, match="LoRA"):
        process(run_server, [model, *OPTIONS, "--port", "0", "--enable-lora"])
    several = ["--data-parallel-size", "2", "--data-parallel-size-local", "2", "--data-parallel-multi-port-external-lb"]
    with pytest.raises(
        UnsupportedError,
        match="--data-parallel-multi-port-external-lb: must not be given, because .* only the front end",
    ):
        process(run_server, [model, *OPTIONS, "--port", "0", *several])


@pytest.mark.slow
def test_a_model_rejected_by_a_worker_is_not_served(vllm_process, checkpoint, tmp_path, capfd):
    model = shutil.copytree(checkpoint(**SMALL, tied=True), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] * 2}, model / "model.safetensors")
    with pytest.raises(BackendError, match="did not start"):
        vllm_process(fork=False)(run_server, [str(model), *OPTIONS, "--skip-tokenizer-init", "--port", "0"])
    assert "tie_word_embeddings" in "".join(capfd.readouterr())


@pytest.mark.slow
def test_a_rejected_option_has_its_own_exit_status(model):
    """The status differs from those of success and of unequal logprobs."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "alignkit.cli", "serve", model, *OPTIONS, "--api-server-count", "2"],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | ENV,
    )
    assert done.returncode not in (0, 1), done.stdout + done.stderr
    assert "--api-server-count: must be 1" in done.stderr
