"""Versions of Megatron-core: the facts that its names give, and the versions with which all tests passed.

No other file depends on a version. docs/megatron.md lists the versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from alignkit.engines.versions import Names, Versions


@dataclass(frozen=True)
class Version:
    """Facts of a version.

    hook: GPTModel.forward accepts `output_processor`. Without it `logprobs` passes its request by a context variable.
    """

    hook: bool


def derive(names: Names) -> Version:
    """Return the facts that the names of Megatron-core give.

    Features: "output_processor" of GPTModel; "hybrid", HybridModel; "cross_entropy_group", the loss takes its group.
    """
    names.require("")
    names.has("hybrid")
    names.optional("cross_entropy_group")
    return Version(hook=names.has("output_processor"))


RELEASES = {
    "0.16.1": "44b622f9de8229a74030bd65",
    "0.17.0": "15ce4744e617b81c12d91ac4",
    "0.17.1": "222501341b266307a670d598",
    "0.18.2": "b936d58276a6225b7461bf08",
    "0.19.0": "e375d5019175a75866c2c159",
    "0.19.2": "cb8ba524db8aab59f8c12044",
}
"""Validated releases -> hash of their files with hook points (tests/megatron/test_hook_points.py).

Versions with equal files are one entry: 0.16.0 and 0.16.1, 0.18.0 to 0.18.2.
"""
COMMITS = {
    "0.19.0 (71e418e)": "93048de45afd88be0da8b873",  # SkyRL's
    "0.20.0 (14346b6)": "c40735787741d7fca33da39b",  # NeMo-RL's
    "0.20.0 (d98e8a6)": "149a3e1a550ec2575c6f1bda",
}
"""The same for commits, whose sources the tests do not have: benchmarks/results/versions.jsonl has their runs."""
VALIDATED = RELEASES | COMMITS
"""Versions of which benchmarks/versions.py has shown bit-equal logprobs."""

VERSIONS: Versions[Version] = Versions(
    "Megatron-core",
    "megatron-core",
    "megatron.core",
    Path(__file__).parent,
    derive,
    VALIDATED,
    users={
        "topk_routing_with_score_function": ("transformer/moe/moe_utils.py", "transformer/moe/router.py"),
        "_VocabParallelCrossEntropy": ("fusions/fused_cross_entropy.py", "tensor_parallel/cross_entropy.py"),
        # TransformerEngine, inference, and attention with a latent, which is rejected, use it themselves.
        "apply_rotary_pos_emb": (
            *(f"models/common/embeddings/{file}.py" for file in ("__init__", "rope_utils", "rotary_pos_embedding")),
            *(f"transformer/{file}.py" for file in ("attention", "multi_latent_attention")),
            *(f"transformer/experimental_attention_variant/{file}.py" for file in ("absorbed_mla", "dsa")),
            "extensions/transformer_engine.py",
            "inference/contexts/dynamic_context.py",
        ),
    },
)


def installed(*checks: str) -> Version:
    """Return the facts of the installed Megatron-core; raise UnsupportedError if it is not accepted.

    checks: names of the checks that its certificate must have if it is not validated.
    """
    return VERSIONS.installed(*checks)


def evidence() -> str:
    """Return what the installed Megatron-core was accepted by, which all ranks must agree on."""
    return VERSIONS.evidence(*VERSIONS.found())
