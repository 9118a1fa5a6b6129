"""Imports of the fork server of `VllmProcess`: vLLM, under the environment that vLLM and torch read on import."""

import os

from tests.vllm.settings import ENV

os.environ.update(ENV)

import vllm.engine.arg_utils
import vllm.entrypoints.llm
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker  # noqa: F401

from alignkit.vllm.versions import VERSIONS

VERSIONS.inspect_installed()
