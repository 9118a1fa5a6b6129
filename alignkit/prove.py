"""`alignkit prove`: shows on this machine that alignkit keeps its contract, and writes certificates.

The ops are proved by their golden bits and self-tests. Engines are proved by the check's aligned rows: vLLM samples
tokens, Megatron-core recomputes their logprobs, and all bits must be equal. A certificate is written only if every
check of its subject passed. `runtime.certificates` describes the file, and docs/proof.md what a proof covers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .check import run as check
from .check.plan import Row, rollouts, trainings
from .config import Config, require_variables
from .contract import k_leaves
from .convert import read_architecture
from .doctor import self_test
from .engines.versions import VALIDATED, Versions, rollout_check, training_check
from .jobs.execute import Progress, check_out, prepare
from .models import FAMILIES
from .models.config import Architecture
from .ops import sweep
from .runtime import dispatch
from .runtime.certificates import OPS, RUNNING, SELF_TEST, Certificate
from .runtime.machine import engine_device, gpus, installed, proof_key, require_environment

COMMAND = "prove"


@dataclass
class Options:
    """Options of a proof.

    out: directory of the engines' results and logs.
    families: model families to prove; random-weight models.
    model: directory of an HF checkpoint, whose sizes the kernels of a GPU are compared at; only config.json is read.
    ops: prove the ops alone.
    tp: largest tensor-parallel size. None: 2, or 1 on a machine with one GPU.
    dtypes: dtypes of the models.
    timeout: time limit of one engine process in seconds.
    """

    out: Path
    families: list[str] = field(default_factory=lambda: ["qwen3", "qwen3_moe"])
    model: Path | None = None
    ops: bool = False
    tp: int | None = None
    dtypes: list[str] = field(default_factory=lambda: ["bfloat16"])
    timeout: float = 1800.0


@dataclass
class Proof:
    """Result for one subject: the checks that passed with their counts, and the failures."""

    subject: str
    key: dict[str, str]
    checks: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    certificate: Path | None = None

    def write(self) -> None:
        """Write the certificate, unless a check failed."""
        if not self.failures:
            self.certificate = Certificate(self.subject, self.key, self.checks).write()


Report = Callable[[str, str | None], None]
"""Receiver of each check of the ops: its name, and its failure or None."""


def run(options: Options, progress: Progress, report: Report) -> list[Proof]:
    """Run the proof and write a certificate for each subject whose checks all passed.

    Raises:
        UnsupportedError: an engine is missing, or lacks a hook point.
        InputError: an option or environment variable is invalid.
        WorkerError: an engine process failed.
    """
    require_variables()
    check_out(options.out, command=COMMAND)
    prepare(options.out, files=(), folders=(), command=COMMAND)
    with unproved_allowed(options.out):
        require_environment()
        proofs = [prove_ops(report, sizes(options))]
        if not options.ops and not proofs[0].failures:
            proofs += prove_engines(options, progress)
    return proofs


def prove_ops(report: Report, problems: Mapping[str, sweep.Problems]) -> Proof:
    """Prove the ops on this machine: golden bits, row invariance, gradients, tensor-parallel ranks, sizes of a model.

    problems: name of the sizes -> problems at which the kernels of a GPU are compared.
    """
    proof, started = Proof(OPS, proof_key()), time.monotonic()

    def record(name: str, failure: str | None, count: int = 1) -> None:
        report(name, failure)
        if failure is None:
            proof.checks[name] = count
        else:
            proof.failures.append(f"{name}: {failure}")

    for name, failure in self_test():
        record(name, failure)
    proof.checks[SELF_TEST] = len(proof.checks)
    for name, wanted in problems.items():
        for op, comparisons in sweep.compare(engine_device(), dispatch.backend_of(engine_device()), wanted):
            failure = next((f"{kernel}: {why}" for kernel, why in comparisons.items() if why), None)
            record(f"{op}: all kernels are equal at the sizes of {name}", failure, len(comparisons))
    proof.seconds = time.monotonic() - started
    proof.write()
    return proof


def families_of(model: Path | None) -> list[str]:
    """Return the family of an HF checkpoint in a list, empty for None."""
    return [] if model is None else [read_architecture(model).family]


def sizes(options: Options) -> dict[str, sweep.Problems]:
    """Return the problems of the model by a name for its sizes; none without a model, or on a CPU.

    On a CPU, the other kernel is the reference, which would take hours.
    """
    if options.model is None or not gpus():
        return {}
    arch = read_architecture(options.model)
    return {f"{options.model.name} at tp{tp}": problems(arch, tp) for tp in {1, options.tp or check.default_tp()}}


def engines() -> list[Versions]:
    """Return the versions of both engines, vLLM's first; raise UnsupportedError if one is not installed."""
    check.require_engines(COMMAND)
    from .megatron import versions as megatron
    from .vllm import versions as vllm

    return [vllm.VERSIONS, megatron.VERSIONS]


def prove_engines(options: Options, progress: Progress) -> list[Proof]:
    """Prove the installed engines by the aligned rows of a check for each family."""
    found, started = engines(), time.monotonic()
    proofs = {versions.subject: Proof(versions.subject, versions.key(*versions.found())) for versions in found}
    tp = options.tp or check.default_tp()
    failures: list[str] = []
    for family in options.families:
        experts = FAMILIES[family].experts is not None
        result = check.run(
            check.Options(
                out=options.out / family,
                family=family,
                dtypes=options.dtypes,
                tp=tp,
                pairs=pairs(tp, bool(gpus()), experts),
                timeout=options.timeout,
            ),
            progress,
        )
        failures += result.failures
        for compared in result.compared:
            for subject, name in _checks(family, experts, compared.row).items():
                checks = proofs[subject].checks
                checks[name] = checks.get(name, 0) + compared.report.tokens
    for versions, proof in zip(found, proofs.values(), strict=True):
        proof.failures, proof.seconds = failures, time.monotonic() - started
        if versions.state(*versions.found()) != VALIDATED:
            proof.write()
    return list(proofs.values())


ROWS = (1, 9, 40, 130, 300, 1100)
"""Rows of the problems of a model, at least one for each kind of kernel."""


def problems(arch: Architecture, tp: int) -> dict[str, list[str]]:
    """Return the problems of a model on one of `tp` tensor-parallel ranks, forward and backward, bf16."""
    heads, kv_heads = arch.heads // tp, max(1, arch.kv_heads // tp)
    attention = f"heads={heads} kv_heads={kv_heads} head_dim={arch.head_dim}"
    qkv, out = (heads + 2 * kv_heads) * arch.head_dim, heads * arch.head_dim
    dense = arch.intermediate if not arch.experts else arch.dense_intermediate or arch.shared_intermediate
    column = [(arch.hidden, qkv)] + [(arch.hidden, 2 * dense // tp)] * bool(dense)
    row = [(out, arch.heads * arch.head_dim)] + [(dense // tp, dense)] * bool(dense)
    gemms = [f"k={k} n={n}" for k, n in column]
    gemms += [f"k={k} n={arch.hidden} leaves={max(1, k_leaves(whole) // tp)}" for k, whole in row]
    found = {
        "linear": gemms,
        "attention": [f"{attention} seqs=2"],
        "attention_backward": [f"{attention} seqs=2"],
        "paged_attention": [f"{attention} seqs=2 page=16 pages=40"],
        "rms_norm": [f"h={arch.hidden}"],
        "rms_norm_backward": [f"h={arch.hidden}"],
        "head_statistics": [f"ids={arch.vocab // tp} k={arch.hidden}"],
    }
    if arch.experts:
        k, n = arch.hidden, arch.intermediate // tp
        found |= {
            "moe_gated": [f"k={k} n={2 * n} experts={arch.experts}"],
            "moe_products": [f"k={n} n={k} experts={arch.experts} leaves={max(1, k_leaves(arch.intermediate) // tp)}"],
            "moe_gradients": [f"k={k} n={2 * n} experts={arch.experts}"],
            "moe_combine": [f"h={k} top_k={arch.top_k}"],
        }
    return {op: [f"rows={rows} {words}" for words in all_ for rows in ROWS] for op, all_ in found.items()}


def describe(proof: Proof) -> str:
    """Return a proof's result as text."""
    if proof.failures:
        return "\n".join([f"{proof.subject}: NOT proved, no certificate", *(f"  {each}" for each in proof.failures)])
    written = f"certificate {proof.certificate}" if proof.certificate else "validated, needs no certificate"
    return f"{proof.subject}: {len(proof.checks)} checks passed in {proof.seconds:.0f} s; {written}"


def pairs(tp: int, gpu: bool, experts: bool) -> list[tuple[str, str]]:
    """Return the pairs of rollout and training of one family."""
    found = [(rollout, "tp1-padded") for rollout in rollouts(tp, gpu, experts)]
    found += [("v1", "tp1-padded")] if gpu else []
    found += [("batch", name) for name in (*trainings(tp, experts), "tp1-packed") if name != "tp1-padded"]
    if installed("transformer_engine"):
        found.append(("batch", "tp1-te-padded"))
    return found


def _checks(family: str, experts: bool, row: Row) -> dict[str, str]:
    """Return the name of the check that a row is, by engine."""
    sizes = {"tp": row.training_tp, "ep": row.training_ep, "pp": row.training_pp, "cp": row.training_cp}
    return {
        "vllm": rollout_check(family, tp=row.rollout_tp, dp=row.rollout_dp, ep=row.rollout_ep),
        "megatron-core": training_check(experts, sp=row.sequence_parallel, **sizes),
    }


@contextlib.contextmanager
def unproved_allowed(folder: Path) -> Iterator[None]:
    """Let this process, and those started within the block, run what is not proved yet."""
    file, name = (folder / "running").resolve(), Config.proof.name
    file.write_text(RUNNING)
    before = os.environ.get(name)
    os.environ[name] = str(file)
    try:
        yield
    finally:
        file.unlink()
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
