"""The command `alignkit`: check, compare, doctor, serve."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from . import drift
from .check.plan import DTYPES
from .errors import AlignkitError, InputError

EXIT_DIFFERENT = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="alignkit")
def cli() -> None:
    """Training and rollout logprobs, equal to the last bit."""


@cli.command()
@click.option("--model", type=click.Path(path_type=Path),
              help="HF checkpoint directory of a dense Qwen2, Qwen3 or Llama model.  "
                   "[default: a random-weight one is made]")
@click.option("--out", type=click.Path(path_type=Path), default=Path("check-results"), show_default=True,
              help="Directory for the results.")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES),
              help="May be given twice.  [default: both]")
@click.option("--tp", type=int,
              help="Largest tensor-parallel size; 1 leaves those rows out.  [default: 2; 1 with a single GPU]")
@click.option("--full", is_flag=True, help="Every pair of rollout and training, in every dtype.")
@click.option("--max-tokens", default=64, show_default=True, help="Tokens sampled for each prompt.")
@click.option("--temperature", default=1.0, show_default=True, help="Of the sampling.")
@click.option("--seed", default=0, show_default=True, help="Of weights, prompts and sampling.")
@click.option("--timeout", default=1800.0, show_default=True, help="Seconds one engine may take.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write report.html.")
def check(model, out, dtypes, tp, full, max_tokens, temperature, seed, timeout, report) -> None:
    """Run real engines before and after patching and compare their logprobs.

    Writes check.json, run.json, report.html and the engines' logs into --out. Exit status: 0 if every patched
    row is equal to the last bit, 1 if one is not, 2 if the check could not be made.
    """
    from .check import report as reports
    from .check import run as runs
    from .check.terminal import Terminal, console, interrupted_by_sigterm

    if report:
        reports.require_report_libraries()
    options = runs.Options(
        out=out, model=model, dtypes=list(dict.fromkeys(dtypes)) or list(DTYPES), tp=tp, full=full,
        max_tokens=max_tokens, temperature=temperature, seed=seed, timeout=timeout)
    screen = console()
    with interrupted_by_sigterm(), Terminal(screen) as progress:
        result = runs.run(options, progress)
    if report:
        reports.write_html(result, out / "report.html")
    screen.print(reports.table(result))
    screen.print(reports.headline(result), style="bold", soft_wrap=True)
    screen.print(f"{result.info['seconds']['all']} s; results in {out}: check.json, run.json"
                  + (", report.html" if report else ""), soft_wrap=True)
    if result.failures:
        for failure in result.failures:
            click.echo(f"not equal: {failure}", err=True)
        sys.exit(EXIT_DIFFERENT)


@cli.command()
@click.argument("rollout", type=click.Path(path_type=Path))
@click.argument("training", type=click.Path(path_type=Path))
@click.option("--allow-contract-mismatch", is_flag=True, help="Compare although the contract ids differ.")
@click.option("--worst", default=10, show_default=True, help="How many of the worst tokens to print.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(rollout, training, allow_contract_mismatch, worst, as_json) -> None:
    """Compare two logprob files, ROLLOUT and TRAINING.

    Exit status: 0 if all logprobs are equal to the last bit, 1 if not, 2 if the files cannot be compared.
    """
    if worst < 0:
        raise InputError(f"worst: {worst} is negative")
    report = drift.compare(drift.load(rollout), drift.load(training), worst=worst,
                           allow_contract_mismatch=allow_contract_mismatch)
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
    if not report.all_equal:
        sys.exit(EXIT_DIFFERENT)


@cli.command()
def doctor() -> None:
    """Print versions, live patches, backends and the contract, and test the invariance of the ops here.

    Exit status: 0 if every test passes, 1 if one does not.
    """
    from . import doctor as doctors

    for line in doctors.facts():
        click.echo(line)
    passed = True
    for name, problem in doctors.self_test():
        click.echo(f"{'FAIL' if problem else 'pass'}  {name}" + (f": {problem}" if problem else ""))
        passed = passed and problem is None
    if not passed:
        sys.exit(EXIT_DIFFERENT)


@cli.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="MODEL [OPTIONS OF VLLM SERVE]...")
def serve(arguments) -> None:
    """Serve MODEL with vLLM's own server, aligned, or not at all.

    Takes the options of `vllm serve`; --help lists them. What cannot be aligned is refused before the server listens.
    """
    from .vllm.serve import serve as serve_vllm

    serve_vllm(arguments)


def main(args: list[str] | None = None) -> None:
    """The entry point: errors of alignkit and of usage become one message and exit status 2."""
    try:
        cli.main(args, prog_name="alignkit", standalone_mode=False)
    except click.ClickException as e:
        e.show()
        sys.exit(EXIT_ERROR)
    except AlignkitError as e:
        click.echo(f"error: {e}", err=True)
        sys.exit(EXIT_ERROR)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; the engines were stopped", err=True)
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
