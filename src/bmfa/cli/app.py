"""The `bmfa` command: the list of its subcommands, and how errors reach the terminal."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from bmfa import __version__
from bmfa.cli.ablation import ablation
from bmfa.cli.bench.attention import attention as bench_attention
from bmfa.cli.bench.model import model as bench_model
from bmfa.cli.bench.reduction import reduction as bench_reduction
from bmfa.cli.bench.trees import trees as bench_trees
from bmfa.cli.closed_loop import closed_loop
from bmfa.cli.estimate import estimate
from bmfa.cli.evaluate import evaluate
from bmfa.cli.explore import explore
from bmfa.cli.groups import expanded
from bmfa.cli.info import info
from bmfa.cli.methods import help_text, methods
from bmfa.cli.output import check_targets, fail, flushed_stdout, process_rank
from bmfa.cli.probe import probe
from bmfa.cli.report import report
from bmfa.cli.screen import screen
from bmfa.cli.synthetic import synthetic
from bmfa.cli.tune import part_of, tune
from bmfa.records import made_by_command

# Commands whose work torchrun may divide between processes; the first process runs any other alone.
MULTI_PROCESS = ("probe", "closed-loop", "evaluate")
# Exit status of a program that a closed pipe ends: 128 + SIGPIPE.
BROKEN_PIPE_STATUS = 141
# Exit status of a program that Ctrl-C ends: 128 + SIGINT.
INTERRUPTED_STATUS = 130


class Command(TyperCommand):
    """A subcommand that checks its targets before the work, and says how to go on after Ctrl-C."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            error.ctx = ctx  # type: ignore[attr-defined]  # some errors of the parser lack it
            raise

    def invoke(self, ctx: Any) -> Any:
        if self.name in MULTI_PROCESS:
            # The order in which MKL adds depends on the number of threads, which torchrun changes.
            os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
        elif process_rank() != 0:
            return None
        check_targets(ctx.params.get("json"), ctx.params.get("csv"))
        try:
            result = super().invoke(ctx)
            with flushed_stdout():
                return result
        except KeyboardInterrupt:
            print(f"bmfa: interrupted{_how_to_resume(ctx)}", file=sys.stderr)
            sys.exit(INTERRUPTED_STATUS)
        except BrokenPipeError:
            sys.exit(BROKEN_PIPE_STATUS)


app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    subcommand_metavar="COMMAND",
)
bench_app = typer.Typer(
    help="Speed and error, each with its baseline of the same run.",
    rich_markup_mode=None,
    subcommand_metavar="WHAT",
)
SCORES, MODELS = help_text(("summary", "rule")), help_text(("full", "rule", "reduction"))
EPILOGS = {"synthetic": SCORES, "probe": SCORES, "evaluate": MODELS}
EPILOGS |= dict.fromkeys(("closed-loop", "screen"), help_text(("rule",)))
COMMANDS = (
    *(report, synthetic, probe, ablation, closed_loop, evaluate),
    *(screen, explore, estimate, tune, methods, info),
)
for run in COMMANDS:
    name = run.__name__.replace("_", "-")
    app.command(name, cls=Command, epilog=EPILOGS.get(name))(expanded(run))
for benchmark in (bench_trees, bench_attention, bench_model, bench_reduction):
    bench_app.command(cls=Command)(expanded(benchmark))
app.add_typer(bench_app, name="bench")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"bmfa {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Measure, bound and repair what attention loses when it is summarised coarsely."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Bad input ends the process with exit status 2 and one line on standard error.

    Args:
        arguments: the words that follow `bmfa`; those of this process by default.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not sys.stderr.isatty():  # packages that load weights show no bars in a pipe, either
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        with made_by_command(words):
            status = typer.main.get_command(app).main(
                words, prog_name="bmfa", standalone_mode=False, obj=words
            )
    except typer.TyperException as error:
        _fail_usage(error)
    except typer.Abort:
        status = INTERRUPTED_STATUS
    except (ValueError, TypeError, OSError, ImportError) as error:
        fail(str(error))
    if status == INTERRUPTED_STATUS:
        print("bmfa: interrupted", file=sys.stderr)
    if status is not None:
        sys.exit(status)


def _how_to_resume(context: Any) -> str:
    """What an interrupted command has saved, and the command that goes on; "" if it cannot resume."""
    if "resume" not in context.params:
        return ""
    command, path = shlex.join(("bmfa", *(context.obj or ()))), context.params["resume"]
    if path is None and (save := context.params.get("save")) is not None:
        path = part_of(save)
        command += f" --resume {shlex.quote(path)}"
    if path is None:
        return (
            "; nothing of this run is saved, because --resume was not given; to be able to go on after "
            f"an interruption: {command} --resume {context.info_name}.part"
        )
    saved = f"partial results are in {path}" if Path(path).exists() else "nothing is saved yet"
    return f"; {saved}; go on with: {command}"


def _fail_usage(error: typer.TyperException) -> NoReturn:
    """Report a command line that cannot be parsed: the value, what is accepted and the help page."""
    context = getattr(error, "ctx", None)
    message = (
        error.format_message()
        .strip()
        .rstrip(".?")
        .replace("Value error, ", "")
        .replace("Input ", "input ")
    )
    message = re.sub(r" \(Possible options: (.*)\)|\. Did you mean (.*)", _suggestion, message)
    validation = getattr(error.__cause__, "errors", None)
    if validation is not None and (value := repr(validation()[0]["input"])) not in message:
        message = f"{message.partition(', unable')[0]}, not {value}"
    commands = getattr(getattr(context, "command", None), "commands", {})
    if commands and "command" in message:
        message = f"{message}; commands: {', '.join(commands)}"
    path = "bmfa" if context is None else context.command_path
    fail(f"{message[:1].lower()}{message[1:]}; see {path} --help")


def _suggestion(match: re.Match[str]) -> str:
    return f"; did you mean {match[1] or match[2]}"
