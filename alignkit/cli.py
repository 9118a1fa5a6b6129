"""The command line `alignkit`: check, compare, bisect, doctor, serve, watch.

Commands, options and exit statuses are public.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

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
  0    success: all compared values are bitwise equal, all tests passed
  1    a difference was found or a test failed; no other outcome exits with 1
  2    usage error: unknown command or option, missing argument, or a value that the parser rejects
  3    refused: another invalid value or input, or an unsupported feature
  4    failed: an error in an engine, a kernel or the operating system
  5    unexpected error: use `alignkit --traceback COMMAND ...` to locate it
  130  interrupted by Ctrl-C or SIGTERM
"""
DTYPES = ("bfloat16", "float32")
BISECT_FAMILIES = {
    name: family for name, family in FAMILIES.items() if family.experts is None or family.experts.score == "softmax"
}
"""Families that `alignkit bisect` supports: dense, or MoE with a softmax router."""


class FamilyName(click.Choice):
    """The name of a model family in `alignkit.models`, spelled with hyphens or underscores."""

    def __init__(self, names: Iterable[str]):
        super().__init__([name.replace("_", "-") for name in names])

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(value.replace("_", "-"), param, ctx).replace("-", "_")


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

    Run `alignkit COMMAND --help` for the options of a command.
    """
    settings["traceback"] = with_traceback


@cli.command()
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Local Hugging Face checkpoint directory.  [default: create a small model with random weights]  "
    "Supported architectures: "
    f"{', '.join(ARCHITECTURES)}.",
)
@click.option(
    "--model-family",
    type=FamilyName(FAMILIES),
    help="Family of the random-weight model; not used with --model.  [default: qwen3, and qwen3-moe for two "
    "more pairs]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("check-results"),
    show_default=True,
    help="Output directory: new, empty, or with results of an earlier check, which are replaced.",
)
@click.option(
    "--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), help="Model dtype; repeatable.  [default: both]"
)
@click.option(
    "--tp",
    type=int,
    help="Tensor-parallel size to test in addition to 1; must divide the model's heads.  [default: 2; 1 with a single "
    "GPU]",
)
@click.option(
    "--full",
    is_flag=True,
    help="Test every pair of rollout and training setups in every dtype; takes longer. The default tests each rollout "
    "against training tp1-padded and each training against a batched rollout in the first dtype, and two pairs in "
    "each other dtype.",
)
@click.option(
    "--training",
    "trainings",
    metavar="SETUP",
    multiple=True,
    help="Test only this training setup, against a batched rollout; repeatable. Form: "
    "tpN[-sp][-epN][-te][-ppN][-cpN]-BATCH, where sp = sequence parallelism, te = TransformerEngine layer spec, and "
    "BATCH is one (one sequence per micro-batch), padded or packed.",
)
@click.option("--max-tokens", default=64, show_default=True, help="Tokens to sample per prompt.")
@click.option("--temperature", default=1.0, show_default=True, help="Sampling temperature.")
@click.option("--seed", default=0, show_default=True, help="Seed for weights, prompts and sampling.")
@click.option("--timeout", type=float, default=1800, show_default=True, help="Time limit per engine, in seconds.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write report.html.")
def check(model, model_family, out, dtypes, tp, full, trainings, max_tokens, temperature, seed, timeout, report) -> int:
    """Compare logprobs of stock and of aligned engines.

    Samples tokens with vLLM, recomputes their logprobs with Megatron-core and compares the bits. Runs stock engines and
    aligned ones, which alignkit has patched ("patched" in the output), each in its own process. Writes check.json,
    run.json, report.html and the engine logs to --out.

    Exit status: 0 if all logprobs of aligned engines are bitwise equal, 1 if any differ, 3 if the check was refused
    before an engine started, 4 if an engine failed.
    """
    from .check import report as reports
    from .check import run as runs
    from .check.terminal import Terminal, console, interrupted_by_sigterm

    if report:
        reports.require_report_libraries()
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
    help="Compare files whose contract ids differ, such as those of a stock and an aligned engine. A contract id names "
    "the definition of the bits that an aligned engine computes.",
)
@click.option(
    "--worst", type=click.IntRange(min=0), default=10, show_default=True, help="Number of worst tokens to print."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def compare(rollout, training, allow_contract_mismatch, worst, as_json) -> int:
    """Compare two logprob files.

    ROLLOUT and TRAINING are files written by `alignkit.drift.save`. Prints drift metrics and the tokens whose
    logprobs differ most. docs/drift.md explains the metrics.

    Exit status: 0 if all logprobs are bitwise equal, 1 if any differ, 3 if the files cannot be compared.
    """
    from rich.console import Console
    from rich.table import Table

    from . import drift

    report = drift.compare(
        drift.load(rollout), drift.load(training), worst=worst, allow_contract_mismatch=allow_contract_mismatch
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
    type=click.Path(path_type=Path),
    help="Local Hugging Face checkpoint directory.  [default: create a small model with random weights]  "
    "Supported architectures: "
    f"{', '.join(family.architecture for family in BISECT_FAMILIES.values())}.",
)
@click.option(
    "--arch",
    type=FamilyName(BISECT_FAMILIES),
    default="qwen3",
    show_default=True,
    help="Family of the random-weight model; not used with --model.",
)
@click.option("--dtype", type=click.Choice(DTYPES), default=DTYPES[0], show_default=True, help="Model dtype.")
@click.option(
    "--tokens",
    type=click.Path(path_type=Path),
    help="File with the token sequences to run: a logprob file, or a replay file of alignkit.drift.Monitor.  [default: "
    "the sequences of the recording if one side is a recording, else random ones]",
)
@click.option(
    "--decode",
    default=0,
    show_default=True,
    help="Tokens to sample after each sequence, to record decode steps. The vLLM side samples them (A if both sides "
    "are vLLM); the other side gets them as input.",
)
@click.option(
    "--swap",
    metavar="OP=aligned",
    help="Also run the stock sides with one op replaced by alignkit's. OP: rms_norm, linear, rope, attention, "
    "silu_mul or head. MoE models are refused.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("bisect-results"),
    show_default=True,
    help="Output directory: new, empty, or with results of an earlier bisect, which are replaced.",
)
@click.option(
    "--budget",
    metavar="MIB",
    default=256,
    show_default=True,
    help="MiB of tensor values to record per side. If all values need more, the first run records digests, and a "
    "second run records the values of some of the differing tokens.",
)
@click.option("--seed", default=0, show_default=True, help="Seed for weights, tokens and sampling.")
@click.option("--timeout", type=float, default=1800, show_default=True, help="Time limit per engine, in seconds.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write report.html.")
def bisect(a, b, model, arch, dtype, tokens, decode, swap, out, budget, seed, timeout, report) -> int:
    """Find the first model activation that differs between two engines.

    Runs the same tokens and weights through both sides, A and B, and compares their activations in the order of
    computation. Each side is one of stock-vllm, aligned-vllm, stock-megatron, aligned-megatron and hf (Hugging Face
    Transformers), or the directory of a recording, such as OUT/recordings/a of an earlier run.

    \b
    Settings of a side follow a colon, separated by commas:
      tp=N               tensor-parallel size (vLLM, Megatron-core)
      chunk=N            maximum number of tokens per step (vLLM)
      batch_invariant=1  vLLM's batch-invariant mode (stock-vllm on a GPU)
      mode=MODE          micro-batches (Megatron-core, hf): padded (default),
                         one (one sequence each), or packed
                         (aligned-megatron only)

    Engines run eagerly, without CUDA graphs. Writes bisect.json, report.html, the recordings and the engine logs to
    --out.

    Exit status: 0 if nothing differs, 1 if something differs, 3 if the comparison was refused, 4 if an engine failed
    or is not deterministic.

    \b
    Examples:
      alignkit bisect stock-vllm stock-megatron
      alignkit bisect stock-vllm:tp=2,chunk=16 aligned-megatron:mode=packed
      alignkit bisect stock-vllm stock-megatron --swap linear=aligned
      alignkit bisect aligned-vllm:tp=2 aligned-megatron --model DIR --decode 8
    """  # noqa: D301 - click reads the control character \b
    from .check import report as reports
    from .check.terminal import Terminal, console, interrupted_by_sigterm
    from .drift.bisect import report as views
    from .drift.bisect import run as runs

    if report:
        reports.require_report_libraries()
    op, _, to = (swap or "").partition("=")
    if swap and to != "aligned":
        raise InputError(f"swap: must have the form OP=aligned, got {swap!r}")
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
@click.option(
    "--explain",
    "op",
    metavar="OP",
    help="Print the kernel that computes OP for the problem NAME=VALUE..., and why other kernels are skipped: not "
    "applicable, or slower. Defaults: family=sm90 (Hopper GPUs) and its fastest backend. rows is the number of tokens "
    "(M of a GEMM).",
)
@click.option(
    "--recipe",
    type=click.Path(exists=True, path_type=Path),
    help="Check the settings of a verl, NeMo-RL or slime recipe (YAML file or shell script), or of all recipes in a "
    "folder.",
)
@click.argument("problem", nargs=-1, metavar="[NAME=VALUE]...")
def doctor(op, recipe, problem) -> int:
    """Check the installation and test the kernels.

    Prints the versions, contract, kernels, backends and patches of this environment. Then compares the ops' results
    with stored bits ("golden bits") and tests their batch invariance. With --explain or --recipe,
    does what that option says instead.

    \b
    Examples:
      alignkit doctor
      alignkit doctor --explain linear rows=64 k=4096 n=6144 dtype=bf16
      alignkit doctor --recipe run_qwen3_8b_megatron.sh

    An unknown OP prints the list of known ops. A missing NAME=VALUE prints the names that OP requires.

    Exit status: 0 if all tests pass, 1 if any fail, 3 if the recipe has unsupported settings.
    """  # noqa: D301 - click reads the control character \b
    if recipe is not None:
        from .integrations import recipe as recipes

        lines, supported = (recipes.survey if recipe.is_dir() else recipes.report)(recipe)
        for line in lines:
            click.echo(line)
        return 0 if supported else EXIT_REFUSED
    if op is not None:
        from .explain import explain

        for line in explain(op, problem):
            click.echo(line)
        return 0
    if problem:
        raise click.UsageError("NAME=VALUE: requires --explain OP")
    from . import doctor as doctors

    for line in doctors.facts():
        click.echo(line)
    passed = True
    for name, failure in doctors.self_test():
        click.echo(f"{'FAIL' if failure else 'pass'}  {name}" + (f": {failure}" if failure else ""))
        passed = passed and failure is None
    return 0 if passed else EXIT_DIFFERENT


@cli.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="MODEL [VLLM SERVE OPTIONS]...")
def serve(arguments) -> None:
    """Run `vllm serve` with alignkit's patch.

    Accepts the options of `vllm serve`; `alignkit serve --help` lists them. Refuses unsupported options before the
    server accepts connections.
    """
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
    help="Address to listen on. The default accepts connections from this machine only; other addresses expose the "
    "page to the network.",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="Port; 0 picks a free one."
)
def watch(directory, host, port) -> int:
    """Show the files of a drift monitor in a browser.

    Serves a live page with the drift of each step, a table of ranks, and the worst tokens. DIR is the directory given
    to alignkit.drift.Monitor.
    """
    from .check.terminal import interrupted_by_sigterm
    from .watch.server import serve as serve_page

    try:
        with interrupted_by_sigterm():
            serve_page(directory, host, port, lambda url: click.echo(f"{directory}: {url}  (press Ctrl-C to stop)"))
    except KeyboardInterrupt:  # the normal way to stop the server
        return EXIT_INTERRUPTED
    return 0


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
    """Print the error and return the exit status."""
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
