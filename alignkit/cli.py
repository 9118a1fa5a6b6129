"""The command line `alignkit`: check, compare, bisect, doctor, serve, watch.

This file parses options, prints results and sets the exit status; the commands' work is in the modules they import.
Names of commands and options, and exit statuses, are public. Help texts may change. docs/drift.md (check, compare, exit
statuses), docs/bisect.md and docs/monitor.md (watch) list the same options.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from .errors import AlignkitError, InputError, UnsupportedError
from .models import ARCHITECTURES, FAMILIES

# Each command imports its modules when it runs. A broken installation then ends with a one-line error and status 5,
# instead of a traceback and Python's status 1, which means "not equal" here.

EXIT_DIFFERENT = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_FAILED = 4
EXIT_UNEXPECTED = 5
EXIT_INTERRUPTED = 130
STATUSES = """\b
Exit status:
  0    success: all values that must be equal are bitwise equal, all tests passed
  1    such a value differs, or a test failed; no other outcome exits with 1
  2    usage error: unknown command or option, missing argument, or a value that
       the parser rejects, such as text for a number or an unknown --dtype
  3    refused: an invalid or unsupported value (such as --tp 0), file, model or
       environment
  4    failed: an error in an engine, a kernel or the operating system
  5    unexpected error: use `alignkit --traceback COMMAND ...` to locate it
  130  interrupted by Ctrl-C or SIGTERM
"""
DTYPES = ("bfloat16", "float32")
"""Values of `--dtype`, equal to `check.plan.DTYPES`, whose module imports torch (tests/cli/test_status.py)."""
BISECT_FAMILIES = {
    name: family for name, family in FAMILIES.items() if family.experts is None or family.experts.score == "softmax"
}
"""Families that `alignkit bisect` supports: dense, or MoE with a softmax router."""
SERVE_HELP = """\
Usage: alignkit serve [MODEL] [VLLM SERVE OPTIONS]...

Run vLLM's server (`vllm serve`) with alignkit's patch. Its logprobs are then
bitwise equal to the logprobs of a patched Megatron-core model with the same
weights. alignkit refuses unsupported options before the server accepts
connections, with exit status 3. The help of `vllm serve` follows; for more of
it: `alignkit serve --help=all`.
"""
"""Text before the help of vLLM's parser, which does not mention alignkit."""
BISECT_OPS = ("rms_norm", "linear", "rope", "attention", "silu_mul", "head")
"""Values of `--swap`, equal to `bisect.points.OPS`, whose module imports torch (tests/cli/test_status.py)."""
RECIPE = click.Path(path_type=Path)
"""Type of the path of a recipe, or of a folder of recipes."""
REPORT_HELP = "Write report.html. Requires pip install 'alignkit[report]'."


def _block(title: str, names: Iterable[str]) -> str:
    """Return a paragraph of help with one name per line, which click does not rewrap."""
    return "\n\n\b\n" + "\n".join([title, *(f"  {name}" for name in names)])


class FamilyName(click.Choice):
    """The name of a model family in `alignkit.models`, spelled with hyphens or underscores."""

    def __init__(self, names: Iterable[str]):
        super().__init__([name.replace("_", "-") for name in names])

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(value.replace("_", "-"), param, ctx).replace("-", "_")


class IntegerFrom(click.ParamType):
    """An integer of at least `low` and, if given, at most `high`; unlike click.IntRange, its help shows no range."""

    name = "integer"

    def __init__(self, low: int, high: int | None = None):
        self._low, self._high = low, high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = click.INT.convert(value, param, ctx)
        if number < self._low or (self._high is not None and number > self._high):
            wanted = f"at least {self._low}" if self._high is None else f"in [{self._low}, {self._high}]"
            raise InputError(f"{param.name if param else 'value'}: must be {wanted}, got {number}")
        return number


def out_option(command: str, more: str = "") -> Callable:
    """Return the option --out of a command that runs engines. more: further help."""
    return click.option(
        "--out",
        metavar="DIR",
        type=click.Path(path_type=Path),
        default=Path(f"{command}-results"),
        show_default=True,
        help=f"Output directory. It must be new or empty, or hold results of an earlier {command}, which are replaced."
        + more,
    )


timeout_option = click.option(
    "--timeout",
    metavar="SECONDS",
    type=float,
    default=1800,
    show_default=True,
    help="Time limit of each engine; more than 0.",
)
report_option = click.option("--report/--no-report", default=True, show_default=True, help=REPORT_HELP)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=STATUSES)
@click.version_option(package_name="alignkit")
@click.option(
    "--traceback",
    "with_traceback",
    is_flag=True,
    help="Print the Python traceback of an error. Place it before COMMAND.",
)
@click.pass_obj
def cli(settings: dict, with_traceback: bool) -> None:
    """Make vLLM and Megatron-core compute bitwise equal logprobs, and verify it.

    An engine with alignkit's patch is called aligned or patched, an engine without it stock. A rollout samples tokens
    with vLLM. A training recomputes the logprobs of these tokens with Megatron-core.

    Run `alignkit COMMAND --help` for the options of a command.
    """
    settings["traceback"] = with_traceback


@cli.command()
@click.option(
    "--model",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Local Hugging Face checkpoint.  [default: create a small model with random weights]"
    + _block("Supported architectures:", ARCHITECTURES),
)
@click.option(
    "--model-family",
    metavar="FAMILY",
    type=FamilyName(FAMILIES),
    help="Family of the random-weight model; ignored with --model.  [default: qwen3; without --training, also "
    "qwen3-moe in two rollout-training pairs]" + _block("FAMILY is one of:", FamilyName(FAMILIES).choices),
)
@out_option("check")
@click.option(
    "--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), help="Model dtype; repeatable.  [default: both]"
)
@click.option(
    "--tp",
    type=int,
    metavar="N",
    help="Tensor-parallel size to test in addition to size 1; at least 1. N must divide the numbers of attention heads "
    "and KV heads and the MLP widths; for MoE, N must also be a power of two that divides the number of experts.  "
    "[default: 2; 1 on a machine with one GPU]",
)
@click.option(
    "--full",
    is_flag=True,
    help="Test every rollout setup against every training setup, in every dtype; takes longer. Without --full, "
    "in the first --dtype (default: bfloat16) every rollout setup is tested against training setup tp1-padded, and "
    "every training setup against rollout setup batch; in the second dtype only two pairs are "
    "tested: `batch` against `tp1-padded`, and `one` against `tp1-one`.",
)
@click.option(
    "--training",
    "trainings",
    metavar="SETUP",
    multiple=True,
    help="Test only this training setup, against rollout setup batch; repeatable. --full is then ignored. --tp "
    "then only sets the number of KV heads of the random-weight model, at least 4. Pass it only if a SETUP has more "
    "than 4 tensor-parallel ranks, because each rank needs a KV head."
    "\n\n\b\n"
    "SETUP: tpN[-sp][-epN][-te][-ppN][-cpN]-BATCH\n"
    "  tpN    tensor-parallel size\n"
    "  sp     sequence parallelism (needs tpN, N > 1)\n"
    "  epN    expert-parallel size (MoE only)\n"
    "  te     TransformerEngine's layer spec (must be\n"
    "         installed)\n"
    "  ppN    pipeline-parallel size\n"
    "  cpN    context-parallel size\n"
    "  BATCH  one (a sequence per micro-batch),\n"
    "         padded or packed\n"
    "Example: tp2-sp-padded",
)
@click.option(
    "--max-tokens",
    metavar="N",
    type=int,
    default=64,
    show_default=True,
    help="Tokens to sample per prompt; at least 1.",
)
@click.option("--temperature", default=1.0, show_default=True, help="Sampling temperature; at least 0 and finite.")
@click.option(
    "--seed",
    metavar="N",
    type=int,
    default=0,
    show_default=True,
    help="Seed of weights, prompts and sampling; in [0, 2^32).",
)
@timeout_option
@report_option
def check(model, model_family, out, dtypes, tp, full, trainings, max_tokens, temperature, seed, timeout, report) -> int:
    """Compare the logprobs of rollout and training, stock and aligned.

    Samples tokens with vLLM, recomputes their logprobs with Megatron-core, and compares the bits. Does this once with
    stock engines and once with aligned engines ("patched" in the output); setups that the stock engines do not support
    are tested aligned only. Each engine runs in its own process. Writes
    check.json, run.json, report.html and the engines' logs to --out.

    The exit status is 0 if all logprobs of the aligned engines are bitwise equal. It is 1 if any differ, or if a token
    of an MoE model was routed to other experts in training. Differences of stock engines do not count.
    `alignkit --help` lists the other statuses.

    \b
    Rollout setups (vLLM). N is the value of --tp; setups with N run if N > 1:
      batch            all prompts at once
      one              one request at a time
      chunked          all prompts, at most 64 tokens per step
      prefix           the prompts a second time, with a warm prefix cache
      prompt_logprobs  the tokens sampled by batch, evaluated as a prompt
      eager            batch without torch.compile or CUDA graphs (GPUs only)
      tpN              batch on N tensor-parallel ranks
      tpN-ep           tpN with whole experts on each rank (MoE only)
      dpN-ep           batch on N data-parallel replicas that share the experts
                       (MoE only)

    \b
    Training setups (Megatron-core); N is the value of --tp, and setups with N run
    if N > 1:
      tp1, tpN, tpN-sp (MoE also tp1-epN, tpN-sp-epN), each as NAME-one and
      NAME-padded. Setups with packed, te, pp or cp run only with --training.

    \b
    Examples:
      alignkit check
      alignkit check --model DIR --dtype bfloat16 --tp 4
      alignkit check --training tp1-padded --training tp2-sp-packed
    """  # noqa: D301 - click reads the control character \b
    from .check import report as reports
    from .check import run as runs
    from .jobs.page import require_report_libraries
    from .jobs.terminal import Terminal, console, interrupted_by_sigterm

    if report:
        require_report_libraries()
    options = runs.Options(
        out=out,
        model=model,
        family=model_family,
        dtypes=list(dict.fromkeys(dtypes)) or list(DTYPES),
        tp=tp,
        full=full,
        trainings=list(trainings),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        timeout=timeout,
    )
    screen = console()
    with interrupted_by_sigterm(), Terminal(screen) as progress:
        result = runs.run(options, progress)
    if report:
        reports.write_html(result, out / "report.html")
    screen.print(reports.table(result))
    screen.print(reports.headline(result), style="bold", soft_wrap=True)
    screen.print(
        f"{result.info['seconds']['all']} s; results in {out}: check.json, run.json"
        + (", report.html" if report else ""),
        soft_wrap=True,
    )
    for failure in result.failures:
        _print_error(f"not equal: {failure}")
    if (command := runs.bisect_command(options, result)) is not None:
        _print_error(f"to locate the first difference: {command}")
    return EXIT_DIFFERENT if result.failures else 0


@cli.command()
@click.argument("rollout", type=click.Path(path_type=Path))
@click.argument("training", type=click.Path(path_type=Path))
@click.option(
    "--allow-contract-mismatch",
    is_flag=True,
    help="Compare files whose contract ids differ. By default, such files are refused. Each file stores the contract "
    "id of its engine. Aligned engines with equal ids compute equal bits; a stock engine has the id 'stock'. Use this "
    "option to compare a stock with an aligned engine.",
)
@click.option(
    "--allow-weights-mismatch",
    is_flag=True,
    help="Compare files whose weights differ. By default, files with different digests of the weights are refused. A "
    "file without a digest is compared; the report then says that its weights are unknown.",
)
@click.option(
    "--worst",
    metavar="N",
    type=IntegerFrom(0),
    default=10,
    show_default=True,
    help="Number of tokens to print, those with the largest differences first; at least 0.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def compare(rollout, training, allow_contract_mismatch, allow_weights_mismatch, worst, as_json) -> int:
    """Compare two logprob files.

    ROLLOUT and TRAINING are files of the same tokens, written by the Python function `alignkit.drift.save`. Prints
    drift metrics, what is known about weights and settings, the causes of a difference that follow from it, and the
    tokens whose logprobs differ most. `python -m pydoc alignkit.drift.DriftReport` explains the metrics.

    The exit status is 0 if all logprobs are finite and bitwise equal, and 1 if any is not. `alignkit --help` lists the
    other statuses.
    """
    from rich.console import Console
    from rich.table import Table

    from . import drift

    report = drift.compare(
        drift.load(rollout),
        drift.load(training),
        worst=worst,
        allow_contract_mismatch=allow_contract_mismatch,
        allow_weights_mismatch=allow_weights_mismatch,
    )
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        console = Console(highlight=False)
        if report.nonfinite:
            console.print(_left_out(report.nonfinite), soft_wrap=True)
        view = Table(show_header=False, box=None, pad_edge=False)
        for name, value in report.metrics("").items():
            view.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
        console.print(view)
        for line in (*report.identity, *(f"cause: {cause}" for cause in report.causes)):
            console.print(line, soft_wrap=True, markup=False)
        for token in report.worst:
            console.print(f"worst: {token}", soft_wrap=True)
    return 0 if report.all_equal else EXIT_DIFFERENT


def _left_out(count: int) -> str:
    tokens = "1 token with a nonfinite logprob is" if count == 1 else f"{count} tokens with a nonfinite logprob are"
    return f"{tokens} left out of the metrics below (max_abs and later)"


@cli.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--model",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Local Hugging Face checkpoint. Required if one side is a recording and the other an engine. Pass the "
    "recorded model, which is the --model of that run, or OUT/model if it ran without --model.  "
    "[default: create a small model with random weights]"
    + _block("Supported architectures:", (family.architecture for family in BISECT_FAMILIES.values())),
)
@click.option(
    "--model-family",
    "--arch",
    "arch",
    metavar="FAMILY",
    type=FamilyName(BISECT_FAMILIES),
    default="qwen3",
    help="Family of the random-weight model; ignored with --model. --arch is another name of this option.  [default: "
    "qwen3]" + _block("FAMILY is one of:", FamilyName(BISECT_FAMILIES).choices),
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default=DTYPES[0],
    show_default=True,
    help="Model dtype; has no effect on recordings.",
)
@click.option(
    "--tokens",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="File with the token sequences to run: a logprob file, or a replay file of alignkit.drift.Monitor.  [default: "
    "the sequences of the recording if a side is a recording; otherwise random sequences]",
)
@click.option(
    "--decode",
    metavar="N",
    type=int,
    default=0,
    show_default=True,
    help="Tokens to sample after each sequence, in [0, 4096], so that vLLM's decode steps are compared too. The vLLM "
    "side samples the tokens (side A if both are vLLM); the other side receives them as input. N > 0 requires a vLLM "
    "side, and neither side may be a recording. With --swap, the vLLM side that samples must be aligned-vllm.",
)
@click.option(
    "--swap",
    metavar="OP=aligned",
    help="Run each stock engine (hf included) once more, with one op computed by alignkit; recordings are not run "
    "again. If the first difference disappears, this op causes it. Dense models only."
    + _block("OP is one of (head: LM head and log-softmax):", BISECT_OPS),
)
@out_option("bisect", " It must not contain a recording passed as A or B.")
@click.option(
    "--budget",
    metavar="MIB",
    type=int,
    default=256,
    show_default=True,
    help="Largest size of the activations recorded per side, in MiB; at least 1. If all activations fit, one run "
    "records them. Otherwise the first run records a hash of each token's activations. A second run then records the "
    "activations of tokens whose hashes differ, as many as fit.",
)
@click.option(
    "--seed",
    metavar="N",
    type=int,
    default=0,
    show_default=True,
    help="Seed of weights, tokens and sampling; in [0, 2^32).",
)
@timeout_option
@report_option
def bisect(a, b, model, arch, dtype, tokens, decode, swap, out, budget, seed, timeout, report) -> int:
    """Find the first model activation that differs between two engines.

    Runs the same tokens and weights through both sides, A and B, and compares their activations in the order of
    computation.

    \b
    A and B are each one of:
      stock-vllm        vLLM
      aligned-vllm      vLLM with alignkit's patch
      stock-megatron    Megatron-core
      aligned-megatron  Megatron-core with alignkit's patch
      hf                Hugging Face Transformers (dense models only)
      DIR               the recording of an earlier run: OUT/recordings/a or
                        OUT/recordings/b, where OUT is the --out of that run

    \b
    Settings of a side follow a colon, separated by commas:
      tp=N               tensor-parallel size (vLLM, Megatron-core); default 1
      chunk=N            largest number of tokens per step (vLLM's
                         max_num_batched_tokens); default: all tokens
      batch_invariant=1  vLLM's batch-invariant mode (stock-vllm on a GPU);
                         default: off
      mode=MODE          micro-batches (Megatron-core, hf): padded (default),
                         one (one sequence each), or packed
                         (aligned-megatron only)

    vLLM runs eagerly, without torch.compile or CUDA graphs. Writes bisect.json, report.html, the recordings and the
    engines' logs to --out.

    The exit status is 0 if nothing differs, and 1 if an activation or logprob differs. `alignkit --help` lists the
    other statuses. Status 4 also means that an engine gave other bits in its second run (see --budget).

    \b
    Examples:
      alignkit bisect stock-vllm stock-megatron
      alignkit bisect stock-vllm:tp=2,chunk=16 aligned-megatron:mode=packed
      alignkit bisect stock-vllm stock-megatron --swap linear=aligned
      alignkit bisect aligned-vllm:tp=2 aligned-megatron --model DIR --decode 8
    """  # noqa: D301 - click reads the control character \b
    from .bisect import report as views
    from .bisect import run as runs
    from .jobs.page import require_report_libraries
    from .jobs.terminal import Terminal, console, interrupted_by_sigterm

    if report:
        require_report_libraries()
    op, _, to = (swap or "").partition("=")
    if swap and to != "aligned":
        raise InputError(f"swap: must have the form OP=aligned, such as linear=aligned, got {swap!r:.80}")
    if budget < 1:
        raise InputError(f"budget: must be at least 1 MiB, got {budget}")
    options = runs.Options(
        a,
        b,
        out,
        model=model,
        arch=arch,
        dtype=dtype,
        tokens=tokens,
        decode=decode,
        swap=op or None,
        budget=budget << 20,
        seed=seed,
        timeout=timeout,
    )
    screen = console()
    with interrupted_by_sigterm(), Terminal(screen) as progress:
        result = runs.bisect(options, progress)
    if report:
        views.write_html(result, out / "report.html")
    if result.comparison.suspect:
        screen.print(views.table(result))
    screen.print(views.headline(result), style="bold", soft_wrap=True)
    for line in [views.swapped_line(result), *views.notes(result)]:
        if line:
            screen.print(line, soft_wrap=True)
    screen.print(
        f"{result.info['seconds']['all']} s; results in {out}: bisect.json, recordings"
        + (", report.html" if report else ""),
        soft_wrap=True,
    )
    return EXIT_DIFFERENT if result.comparison.suspect else 0


@cli.command()
@click.option("--explain", "op", metavar="OP", help="Run `alignkit explain OP [NAME=VALUE]...` instead.")
@click.option("--recipe", metavar="PATH", type=RECIPE, help="Run `alignkit recipe PATH` instead.")
@click.argument("problem", nargs=-1, metavar="[NAME=VALUE]...")
@click.pass_context
def doctor(context, op, recipe, problem) -> int:
    """Check the installation and test the kernels.

    Prints the versions, contract ids (devices with equal ids compute equal bits), kernels, backends, and the names that
    each engine's patch replaces. Then compares the ops' results
    with stored bits ("golden bits"), and tests that a row's bits do not depend on the other rows of a batch.

    NAME=VALUE is allowed only with --explain.

    The exit status is 0 if all tests pass, and 1 if any fails. `alignkit --help` lists the other statuses.
    """
    if recipe is not None:
        return context.invoke(check_recipe, path=recipe)
    if op is not None:
        return context.invoke(explain, op=op, problem=problem)
    if problem:
        raise click.UsageError(f"NAME=VALUE: requires --explain OP, got {problem[0]!r:.80} without --explain")
    from . import doctor as doctors

    for line in doctors.facts():
        click.echo(line)
    passed = True
    for name, failure in doctors.self_test():
        _print_test(name, failure)
        passed = passed and failure is None
    return 0 if passed else EXIT_DIFFERENT


@cli.command()
@click.option(
    "--model-family",
    "families",
    metavar="FAMILY",
    multiple=True,
    type=FamilyName(FAMILIES),
    help="Family of the random-weight models; repeatable.  [default: qwen3 and qwen3-moe]"
    + _block("FAMILY is one of:", FamilyName(FAMILIES).choices),
)
@click.option(
    "--tp",
    type=IntegerFrom(1),
    metavar="N",
    help="Tensor-parallel size to prove in addition to size 1; at least 1.  [default: 2; 1 on a machine with one GPU]",
)
@click.option(
    "--model",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="HF checkpoint whose family is proved, and at whose sizes all kernels of a GPU are compared. Only its"
    " config.json is read.",
)
@click.option("--ops", is_flag=True, help="Prove the ops alone, without engines.")
@out_option("prove")
@timeout_option
def prove(families, tp, model, ops, out, timeout) -> int:
    """Prove on this machine that versions and a GPU that alignkit does not know keep the bits.

    Tests the ops like `alignkit doctor`. Then samples tokens with aligned vLLM, recomputes their logprobs with aligned
    Megatron-core, and compares the bits, for each FAMILY. If all tests of the ops or of an engine pass, writes a
    certificate, which the patches require for an engine that is not validated. It holds for this machine, these
    versions and these files of the engines, and for the families and parallel sizes that were run.

    The exit status is 0 if all tests passed, and 1 if any failed. `alignkit --help` lists the other statuses.
    """
    from . import prove as proofs
    from .jobs.terminal import Terminal, console, interrupted_by_sigterm

    options = proofs.Options(out, model=model, ops=ops, tp=tp, timeout=timeout)
    options.families = list(dict.fromkeys([*families, *proofs.families_of(model)])) or options.families
    screen = console()
    with interrupted_by_sigterm(), Terminal(screen) as progress:
        results = proofs.run(options, progress, _print_test)
    for proof in results:
        screen.print(proofs.describe(proof), soft_wrap=True, markup=False)
    return EXIT_DIFFERENT if any(proof.failures for proof in results) else 0


@cli.command(short_help="Print which kernel computes an op, and why others are skipped.")
@click.argument("op")
@click.argument("problem", nargs=-1, metavar="[NAME=VALUE]...")
def explain(op, problem) -> int:
    """Print which kernel alignkit selects for OP, and why it rejects the others.

    NAME=VALUE gives sizes, dtypes and layouts. `alignkit explain list` prints every OP with the names that it requires
    or may have, and the meaning of each name. Requires no GPU.

    \b
    Example:
      alignkit explain linear rows=64 k=4096 n=6144 dtype=bf16

    The exit status is 0 if the kernel or the list was printed, and 3 for an unknown OP or an invalid or missing
    NAME=VALUE. `alignkit --help` lists the other statuses.
    """  # noqa: D301 - click reads the control character \b
    from .explain import explain as lines

    for line in lines(op, problem):
        click.echo(line)
    return 0


@cli.command("recipe", short_help="Check if a recipe of verl, NeMo-RL or slime is supported.")
@click.argument("path", metavar="PATH", type=RECIPE)
def check_recipe(path) -> int:
    """Check if alignkit supports the settings of a recipe of verl, NeMo-RL or slime.

    PATH is a YAML file, a shell script, or a folder. In a folder, the recipes that train with Megatron-core are
    checked. Nothing is executed.

    \b
    Example:
      alignkit recipe run_qwen3_8b_megatron.sh

    The exit status is 0 if no setting is unsupported, and 3 if any is. Lines marked "add" are settings that the recipe
    lacks: one enables alignkit, any other makes the framework report drift metrics. "unknown" means that the recipe
    alone does not tell; the engines check the setting when they start. Lines marked "add" or "unknown" do not change
    the status.
    `alignkit --help` lists the other statuses.
    """  # noqa: D301 - click reads the control character \b
    from .integrations import recipe as recipes

    if not path.exists():
        raise InputError(f"path: must be a file or a folder, got {path}, which does not exist")
    lines, supported = (recipes.survey if path.is_dir() else recipes.report)(path)
    for line in lines:
        click.echo(line)
    return 0 if supported else EXIT_REFUSED


@cli.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[MODEL] [VLLM SERVE OPTIONS]...")
def serve(arguments) -> None:
    """Run `vllm serve` with alignkit's patch."""
    if any(argument in ("-h", "--help") or argument.startswith("--help=") for argument in arguments):
        click.echo(SERVE_HELP)
    from .config import require_variables
    from .vllm.serve import serve as serve_vllm

    require_variables()
    serve_vllm(arguments)


@cli.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on. The default accepts connections from this machine only. Another address makes the page "
    "readable by everyone who can reach it.",
)
@click.option(
    "--port",
    metavar="N",
    type=IntegerFrom(0, 65535),
    default=8765,
    show_default=True,
    help="Port to listen on, in [0, 65535]; 0 selects a free port.",
)
def watch(directory, host, port) -> int:
    """Show the drift of a training run in a browser, live.

    DIR is the directory that the training loop passed to `alignkit.drift.Monitor`. Prints the URL of a page with the
    drift of each step, a table of ranks, and the tokens with the largest differences. Runs until Ctrl-C (exit status
    130). Requires pip install 'alignkit[watch]'.
    """
    from .jobs.terminal import interrupted_by_sigterm
    from .watch.server import serve as serve_page

    try:
        with interrupted_by_sigterm():
            serve_page(directory, host, port, lambda url: click.echo(f"{directory}: {url}  (press Ctrl-C to stop)"))
    except KeyboardInterrupt:  # the normal way to stop the server
        return EXIT_INTERRUPTED
    return 0


def _print_test(name: str, failure: str | None) -> None:
    """Print the result of one test of the self-test."""
    click.echo(f"{'FAIL' if failure else 'pass'}  {name}" + (f": {failure}" if failure else ""))


def _print_error(message: object) -> None:
    """Print a message to stderr.

    `click.echo` writes to the underlying byte stream, but vLLM's server replaces `sys.stderr.write` with a function
    that takes text only.
    """
    print(message, file=sys.stderr)


def main(args: list[str] | None = None) -> None:
    """Run a command and exit with a status of `STATUSES`.

    A command returns its status. A SystemExit comes from another program that the command runs, such as vLLM's server;
    its status 1 becomes EXIT_FAILED.

    Args:
        args: Command-line arguments; None takes `sys.argv`.
    """
    settings = {"traceback": False}
    try:
        status = cli.main(args, prog_name="alignkit", standalone_mode=False, obj=settings)
        sys.stdout.flush()
    except click.ClickException as e:
        e.show(sys.stderr)
        status = EXIT_USAGE
    except (KeyboardInterrupt, click.Abort):
        _print_error("interrupted; the engines were stopped")
        status = EXIT_INTERRUPTED
    except SystemExit as e:
        if e.code is not None and not isinstance(e.code, int):
            _print_error(e.code)
        status = EXIT_FAILED if e.code == 1 or not isinstance(e.code, int | None) else e.code
    except BrokenPipeError:  # the reader closed the pipe: discard buffered output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_FAILED
    except Exception as e:
        status = _failed(e, settings["traceback"])
    sys.exit(status)


def _failed(e: Exception, with_traceback: bool) -> int:
    """Print an error and return its exit status."""
    if with_traceback:
        traceback.print_exception(e)
    expected = isinstance(e, (AlignkitError, OSError))
    if expected:
        _print_error(f"error: {e}")
    elif not with_traceback:
        message = " ".join(str(e).split())
        _print_error(f"unexpected {type(e).__name__}: {message:.300}")
        _print_error("run `alignkit --traceback COMMAND ...` to print the traceback")
    if isinstance(e, (InputError, UnsupportedError)):
        return EXIT_REFUSED
    return EXIT_FAILED if expected else EXIT_UNEXPECTED


if __name__ == "__main__":
    main()
