"""The command line: thin, it parses, calls one function, and prints or writes."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from bmfa import __version__

if TYPE_CHECKING:
    from bmfa.records import Record

Options = argparse.Namespace


class Parser(argparse.ArgumentParser):
    """Refuses bad usage in one line with exit status 2, without a page of usage before it."""

    def error(self, message: str) -> NoReturn:
        refuse(f"{message}; see {self.prog} --help")


def build_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        prog="bmfa",
        description="Measure, bound and repair what attention loses when it is summarised coarsely.",
    )
    parser.add_argument("--version", action="version", version=f"bmfa {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_synthetic(commands)
    _add_bench(commands)
    _add_command(
        commands, "info", run_info, "versions, devices and backends, and why one is missing"
    )
    return parser


def _add_command(
    commands: "argparse._SubParsersAction[Parser]",
    name: str,
    run: Callable[[Options], None],
    summary: str,
) -> Parser:
    """A command with the options that all commands share."""
    command = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
    )
    command.set_defaults(run=run)
    command.add_argument(
        "--json", metavar="FILE", help="write the record there; - is standard output"
    )
    command.add_argument("--seed", type=int, default=0, help="seed of everything random (0)")
    command.add_argument("--device", default="cpu", help="cpu (the default), cuda, cuda:1, mps")
    command.add_argument("--quiet", action="store_true", help="print no table and no progress")
    return command


def _add_methods(command: Parser) -> None:
    command.add_argument(
        "--method",
        action="append",
        metavar="NAME:VALUE",
        help="a method such as gamma:0.005 or optimal:0.002; repeat for more; all without it",
    )


def _add_synthetic(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = _add_command(
        commands,
        "synthetic",
        run_synthetic,
        "the stress test: 396 bright minorities on a 16x16 grid, wherever they lie",
    )
    _add_methods(command)
    command.add_argument(
        "--placement",
        action="append",
        metavar="NAME",
        help="corner, shifted-1-1, shifted-4-4, centred or scattered; repeat for more; all without it",
    )
    command.add_argument("--max-depth", type=int, default=4, metavar="D", help="depth limit (4)")
    command.add_argument(
        "--scatter-seeds",
        type=int,
        default=200,
        metavar="N",
        help="draws of the scattered mask (200)",
    )
    command.add_argument(
        "--curve",
        action="store_true",
        help="the failure curve at 4 and 1 cells instead of the sweep",
    )


def _add_bench(commands: "argparse._SubParsersAction[Parser]") -> None:
    bench = commands.add_parser(
        "bench",
        help="speed and error, each with its baseline of the same run",
        description="Speed and error, each with its baseline of the same run.",
    )
    kinds = bench.add_subparsers(metavar="WHAT", required=True)
    trees = _add_command(
        kinds, "trees", run_bench_trees, "trees against the queue-based oracle, and against softmax"
    )
    _add_methods(trees)
    trees.add_argument(
        "--grids", type=int, default=36_000, metavar="N", help="grids of 16x16 (36000)"
    )
    trees.add_argument(
        "--batch-size", type=int, default=64, metavar="N", help="pictures of the softmax part (64)"
    )
    trees.add_argument(
        "--repeats", type=int, default=7, metavar="N", help="timings of which the median counts (7)"
    )


def run_synthetic(options: Options) -> None:
    """bmfa synthetic."""
    from bmfa.experiments import synthetic
    from bmfa.experiments.methods import DEFAULT_METHODS

    methods = options.method or DEFAULT_METHODS
    if options.curve:
        record = synthetic.failure_curve(methods, seed=options.seed)
        finish(record, options, "method cells delta minority_mass gap leaf_percent")
        return
    record = synthetic.run(
        methods,
        options.placement or synthetic.PLACEMENTS,
        max_depth=options.max_depth,
        seed=options.seed,
        scatter_seeds=options.scatter_seeds,
        device=check_device(options.device),
        progress=progress_line(options),
    )
    finish(record, options, "placement method count mean_gap p95_gap leaf_percent")


def run_bench_trees(options: Options) -> None:
    """bmfa bench trees."""
    from bmfa.experiments import bench

    record = bench.trees(
        options.method or bench.TREE_METHODS,
        grids=options.grids,
        batch_size=options.batch_size,
        repeats=options.repeats,
        seed=options.seed,
        device=check_device(options.device),
        progress=progress_line(options),
    )
    columns = "what n dtype method threads milliseconds microseconds_per_grid speedup"
    finish(record, options, f"{columns} multiple_of_softmax leaf_percent")


def run_info(options: Options) -> None:
    """bmfa info."""
    from bmfa.experiments.info import describe

    finish(describe(), options, "what name status")


def finish(record: "Record", options: Options, columns: str) -> None:
    """Write the record where asked, and print its table unless that would spoil the output."""
    from bmfa.records import text_table, write_whole

    if options.json is not None:
        write_whole(options.json, record.to_json())
    if not options.quiet and options.json != "-":
        print(text_table(record.rows, columns.split()))
        if options.json is not None:
            print(f"\nrecord: {options.json}")


def progress_line(options: Options) -> Callable[[int, int], None] | None:
    """A line that counts up on a terminal; nothing in a pipe."""
    if options.quiet or not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\r\033[K" if done >= total else ""
        print(f"\r{done}/{total}{end}", end="", file=sys.stderr, flush=True)

    return show


def check_device(name: str) -> str:
    """The device, if torch has it here."""
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} is not usable ({reason}); pass --device cpu") from None
    return name


def check_target(path: str | None) -> None:
    """Find out before the work whether its result can be written."""
    if path is None or path == "-":
        return
    if Path(path).is_dir():
        raise ValueError(f"--json {path} is a folder; name a file in it")
    Path(path).parent.mkdir(parents=True, exist_ok=True)


def refuse(message: str) -> NoReturn:
    """End with one line and exit status 2."""
    print(f"bmfa: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    try:
        check_target(options.json)
        options.run(options)
    except (ValueError, TypeError, OSError) as error:
        refuse(str(error))
    except BrokenPipeError:
        sys.exit(141)
    except KeyboardInterrupt:
        print("bmfa: interrupted", file=sys.stderr)
        sys.exit(130)
