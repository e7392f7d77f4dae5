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
from bmfa.cli import bench
from bmfa.cli.ablation import ablation
from bmfa.cli.closed_loop import closed_loop
from bmfa.cli.evaluate import evaluate
from bmfa.cli.explore import explore
from bmfa.cli.info import info
from bmfa.cli.methods import help_text, methods
from bmfa.cli.output import check_targets, fail, flushed_stdout, process_rank
from bmfa.cli.probe import probe
from bmfa.cli.report import report
from bmfa.cli.screen import screen
from bmfa.cli.synthetic import synthetic
from bmfa.cli.tune import tune
from bmfa.records import made_by_command

# Commands whose work torchrun may divide between processes; the first process runs any other alone.
MULTI_PROCESS = ("probe", "closed-loop", "evaluate")
# Exit status of a program that a closed pipe ends: 128 + SIGPIPE.
BROKEN_PIPE_STATUS = 141
# Exit status of a program that Ctrl-C ends: 128 + SIGINT.
INTERRUPTED_STATUS = 130


class Command(TyperCommand):
    """A subcommand that accepts `--size 224 448`, and `--lim` as a unique prefix of `--limit`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, self._expand(args))
        except typer.TyperException as error:
            error.ctx = ctx  # type: ignore[attr-defined]  # some errors of the parser lack it
            raise

    def invoke(self, ctx: Any) -> Any:
        if self.name in MULTI_PROCESS:
            # The order in which MKL adds depends on the number of threads, which torchrun changes.
            os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
        elif process_rank() != 0:
            return None
        check_targets(ctx.params["json"], ctx.params.get("csv"))
        try:
            result = super().invoke(ctx)
            with flushed_stdout():
                return result
        except KeyboardInterrupt:
            print(f"bmfa: interrupted{_how_to_resume(ctx)}", file=sys.stderr)
            sys.exit(INTERRUPTED_STATUS)
        except BrokenPipeError:
            sys.exit(BROKEN_PIPE_STATUS)

    def _expand(self, args: Sequence[str]) -> list[str]:
        """Complete abbreviated options, and repeat an option before each of its values."""
        options: dict[str, Any] = {
            name: param for param in self.params for name in param.opts if name.startswith("--")
        }
        has_arguments = any(param.param_type_name == "argument" for param in self.params)
        expanded: list[str] = []
        name, missing = "", 0  # the last option, and how many of its values are yet to come
        for index, word in enumerate(args):
            if word == "--":
                return [*expanded, *args[index:]]
            if word.startswith("--"):
                if missing:
                    raise typer.TyperException(f"Option {name!r} requires an argument")
                name, equals, value = word.partition("=")
                matches = [option for option in options if option.startswith(name)]
                if name not in options and len(matches) == 1:
                    name = matches[0]
                option = options.get(name)
                missing = 0 if option is None or option.is_flag or equals else option.nargs
                expanded.append(name + equals + value)
            elif missing:
                missing -= 1
                expanded.append(word)
            elif not has_arguments and getattr(options.get(name), "multiple", False):
                expanded += [word] if word == "-h" else [name, word]
            else:
                expanded.append(word)
        return expanded


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
app.command("report", cls=Command)(report)
app.command("synthetic", cls=Command, epilog=help_text(("summary", "rule")))(synthetic)
app.command("probe", cls=Command, epilog=help_text(("summary", "rule")))(probe)
app.command("ablation", cls=Command)(ablation)
app.command("closed-loop", cls=Command, epilog=help_text(("rule",)))(closed_loop)
app.command("evaluate", cls=Command, epilog=help_text(("full", "rule", "reduction")))(evaluate)
app.command("screen", cls=Command, epilog=help_text(("rule",)))(screen)
app.command("explore", cls=Command)(explore)
app.command("tune", cls=Command)(tune)
app.command("methods", cls=Command)(methods)
app.command("info", cls=Command)(info)
app.add_typer(bench_app, name="bench")
bench_app.command("trees", cls=Command)(bench.trees)
bench_app.command("attention", cls=Command)(bench.attention)
bench_app.command("model", cls=Command)(bench.model)
bench_app.command("reduction", cls=Command)(bench.reduction)


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
