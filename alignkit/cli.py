"""The command `alignkit`: check, compare, bisect, doctor, serve, watch."""

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

# What a command does is imported when it runs: a broken installation is then an error like others, not a traceback and
# Python's status 1, which here means "not equal".

EXIT_DIFFERENT = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_FAILED = 4
EXIT_UNEXPECTED = 5
EXIT_INTERRUPTED = 130
STATUSES = """\b
Exit status:
  0    all is equal to the last bit
  1    something is not; nothing else ends with 1
  2    wrong usage: an unknown command, option or value
  3    refused: bad input, or something that alignkit cannot keep aligned
  4    failed: an engine, a kernel or the system did
  5    an unexpected error; alignkit --traceback COMMAND ... shows where
  130  interrupted
"""
DTYPES = ("bfloat16", "float32")


class FamilyName(click.Choice):
    """A family of models, as a file of `alignkit.models` is named, with hyphens or underscores."""

    def __init__(self, names: Iterable[str]):
        super().__init__([name.replace("_", "-") for name in names])

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(value.replace("_", "-"), param, ctx).replace("-", "_")


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=STATUSES)
@click.version_option(package_name="alignkit")
@click.option("--traceback", "with_traceback", is_flag=True, help="Show where an error comes from.")
@click.pass_obj
def cli(settings: dict, with_traceback: bool) -> None:
    """Training and rollout logprobs, equal to the last bit."""
    settings["traceback"] = with_traceback


@cli.command()
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help=f"HF checkpoint directory: {', '.join(ARCHITECTURES)}.  [default: a random-weight one is made]",
)
@click.option(
    "--model-family",
    type=FamilyName(FAMILIES),
    help="Of the model that is made.  [default: qwen3, and qwen3-moe for a few rows beside it]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("check-results"),
    show_default=True,
    help="Directory for the results.",
)
@click.option(
    "--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), help="May be given twice.  [default: both]"
)
@click.option(
    "--tp", type=int, help="Largest tensor-parallel size; 1 leaves those rows out.  [default: 2; 1 with a single GPU]"
)
@click.option("--full", is_flag=True, help="Every pair of rollout and training, in every dtype.")
@click.option(
    "--training",
    "trainings",
    multiple=True,
    help="Compare a batch with this training instead of all that: tp1-te-packed (TransformerEngine's layer spec), "
    "tp2-sp-pp2-padded, tp1-cp2-packed, ... May be given several times.",
)
@click.option("--max-tokens", default=64, show_default=True, help="Tokens sampled for each prompt.")
@click.option("--temperature", default=1.0, show_default=True, help="Of the sampling.")
@click.option("--seed", default=0, show_default=True, help="Of weights, prompts and sampling.")
@click.option("--timeout", default=1800.0, show_default=True, help="Seconds one engine may take.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write report.html.")
def check(model, model_family, out, dtypes, tp, full, trainings, max_tokens, temperature, seed, timeout, report) -> int:
    """Run real engines before and after patching and compare their logprobs.

    Writes check.json, run.json, report.html and the engines' logs into --out. Exit status: 0 if every patched
    row is equal to the last bit, 1 if one is not, 3 if the check was refused before an engine was started, 4 if an
    engine failed.
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
        _say(f"not equal: {failure}")
    if (command := runs.bisect_command(options, result)) is not None:
        _say(f"where it begins: {command}")
    return EXIT_DIFFERENT if result.failures else 0


@cli.command()
@click.argument("rollout", type=click.Path(path_type=Path))
@click.argument("training", type=click.Path(path_type=Path))
@click.option("--allow-contract-mismatch", is_flag=True, help="Compare although the contract ids differ.")
@click.option(
    "--worst", type=click.IntRange(min=0), default=10, show_default=True, help="How many of the worst tokens to print."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(rollout, training, allow_contract_mismatch, worst, as_json) -> int:
    """Compare two logprob files, ROLLOUT and TRAINING.

    Exit status: 0 if all logprobs are equal to the last bit, 1 if not, 3 if the files cannot be compared.
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
        view = Table(show_header=False, box=None, pad_edge=False)
        for name, value in report.metrics("").items():
            view.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
        console.print(view)
        for token in report.worst:
            console.print(f"worst: {token}", soft_wrap=True)
    return 0 if report.all_equal else EXIT_DIFFERENT


@cli.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="HF checkpoint directory of a Qwen2, Qwen3, Llama, Mistral, Qwen3-MoE, Qwen2-MoE or Mixtral model.  "
    "[default: a small random-weight one is made]",
)
@click.option(
    "--arch",
    type=FamilyName(name for name, of in FAMILIES.items() if of.experts is None or of.experts.score == "softmax"),
    default="qwen3",
    show_default=True,
    help="Family of the model that is made.",
)
@click.option("--dtype", type=click.Choice(DTYPES), default=DTYPES[0], show_default=True)
@click.option(
    "--tokens",
    type=click.Path(path_type=Path),
    help="A logprob file, or a monitor's replay, whose sequences are run.  [default: random ones, or a recording's]",
)
@click.option(
    "--decode",
    default=0,
    show_default=True,
    help="Tokens that the first vLLM side samples after each sequence, so that it is recorded decoding.",
)
@click.option(
    "--swap",
    metavar="OP=aligned",
    help="Also run the stock sides with one op exchanged for alignkit's: rms_norm, linear, rope, attention, "
    "silu_mul or head.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("bisect-results"),
    show_default=True,
    help="Directory for the results.",
)
@click.option("--budget", default=256, show_default=True, help="MiB of tensors recorded of each side.")
@click.option("--seed", default=0, show_default=True, help="Of weights, tokens and sampling.")
@click.option("--timeout", default=1800.0, show_default=True, help="Seconds one engine may take.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write report.html.")
def bisect(a, b, model, arch, dtype, tokens, decode, swap, out, budget, seed, timeout, report) -> int:
    """Find the first point of the model at which two engines differ.

    A and B are each one of stock-vllm, aligned-vllm, stock-megatron, aligned-megatron and hf, or the directory of a
    recording (such as OUT/recordings/a of an earlier run). Settings follow a colon: stock-vllm:tp=2,chunk=16 or
    aligned-megatron:tp=2,mode=packed (padded, one; packed is aligned-megatron's).

    The same tokens and weights go through both. Engines run eagerly, vLLM without CUDA graphs. Writes bisect.json,
    report.html, the recordings and the engines' logs into --out. Exit status: 0 if nothing differs, 1 if something
    does, 3 if it was refused, 4 if an engine failed or is not deterministic.

    \b
    Examples:
      alignkit bisect stock-vllm stock-megatron
      alignkit bisect stock-vllm stock-megatron --swap linear=aligned
      alignkit bisect aligned-vllm:tp=2 aligned-megatron --model DIR --decode 8
    """
    from .check import report as reports
    from .check.terminal import Terminal, console, interrupted_by_sigterm
    from .drift.bisect import report as views
    from .drift.bisect import run as runs

    if report:
        reports.require_report_libraries()
    op, _, to = (swap or "").partition("=")
    if swap and to != "aligned":
        raise InputError(f"swap: {swap!r} is not OP=aligned")
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
@click.option("--explain", "op", metavar="OP", help="Which kernel computes OP of a problem, such as rows=64, and why.")
@click.option(
    "--recipe",
    type=click.Path(exists=True, path_type=Path),
    help="What alignkit refuses of a recipe of verl, NeMo-RL or slime; of a folder, of each in it.",
)
@click.argument("problem", nargs=-1, metavar="[NAME=VALUE]...")
def doctor(op, recipe, problem) -> int:
    """Print versions, live patches, backends and the contract, and test the invariance of the ops here.

    With --explain, nothing of that: `alignkit doctor --explain linear rows=64 k=4096 n=6144 dtype=bf16 family=sm90`. An OP
    that there is not is answered by the list of those there are, one without a problem by what it takes.

    With --recipe, nothing of that: `alignkit doctor --recipe run_qwen3_8b_megatron.sh`, a YAML file or a script.

    Exit status: 0 if every test passes, 1 if one does not, 3 if something of a recipe is refused.
    """
    if recipe is not None:
        from .integrations import recipe as recipes

        said, served = (recipes.survey if recipe.is_dir() else recipes.report)(recipe)
        for line in said:
            click.echo(line)
        return 0 if served else EXIT_REFUSED
    if op is not None:
        from .explain import explain

        for line in explain(op, problem):
            click.echo(line)
        return 0
    if problem:
        raise click.UsageError("NAME=VALUE: only with --explain")
    from . import doctor as doctors

    for line in doctors.facts():
        click.echo(line)
    passed = True
    for name, problem in doctors.self_test():
        click.echo(f"{'FAIL' if problem else 'pass'}  {name}" + (f": {problem}" if problem else ""))
        passed = passed and problem is None
    return 0 if passed else EXIT_DIFFERENT


@cli.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="MODEL [OPTIONS OF VLLM SERVE]...")
def serve(arguments) -> None:
    """Serve MODEL with vLLM's own server, aligned, or not at all.

    Takes the options of `vllm serve`; --help lists them. What cannot be aligned is refused before the server listens.
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
    help="Where to listen. Others than this machine can read the page only if this is one of its addresses.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="0: any that is free.")
def watch(directory, host, port) -> int:
    """Serve a page over a drift monitor's directory DIR: drift by step, ranks, worst tokens, live."""
    from .check.terminal import interrupted_by_sigterm
    from .watch.server import serve as serve_page

    try:
        with interrupted_by_sigterm():
            serve_page(directory, host, port, lambda url: click.echo(f"{directory}: {url}  (Ctrl-C ends it)"))
    except KeyboardInterrupt:  # how it ends
        return EXIT_INTERRUPTED
    return 0


def _say(message: object) -> None:
    """As an error. Not by click, which looks for the stream of bytes below: vLLM's server exchanges `sys.stderr.write` for one
    that takes text only."""
    print(message, file=sys.stderr)


def main(args: list[str] | None = None) -> None:
    """The entry point: however a command ends, its exit status says how, as in `STATUSES`.

    A command returns its status. SystemExit is another program's within it; its 1 becomes EXIT_FAILED.
    """
    settings = {"traceback": False}
    try:
        status = cli.main(args, prog_name="alignkit", standalone_mode=False, obj=settings)
        sys.stdout.flush()
    except click.ClickException as e:
        e.show(sys.stderr)
        status = EXIT_USAGE
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted; the engines were stopped")
        status = EXIT_INTERRUPTED
    except SystemExit as e:
        if e.code is not None and not isinstance(e.code, int):
            _say(e.code)
        status = EXIT_FAILED if e.code == 1 or not isinstance(e.code, int | None) else e.code
    except BrokenPipeError:  # who read the output has left; what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_FAILED
    except Exception as e:
        status = _failed(e, settings["traceback"])
    sys.exit(status)


def _failed(e: Exception, with_traceback: bool) -> int:
    """Says what went wrong, and returns the exit status."""
    if with_traceback:
        traceback.print_exception(e)
    expected = isinstance(e, (AlignkitError, OSError))
    if expected:
        _say(f"error: {e}")
    elif not with_traceback:
        message = " ".join(str(e).split())
        _say(f"unexpected {type(e).__name__}: {message:.300}")
        _say("alignkit --traceback COMMAND ... shows where")
    if isinstance(e, (InputError, UnsupportedError)):
        return EXIT_REFUSED
    return EXIT_FAILED if expected else EXIT_UNEXPECTED


if __name__ == "__main__":
    main()
