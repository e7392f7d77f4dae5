"""Commands and their options."""

import argparse
from collections.abc import Callable
from typing import NoReturn, TypeAlias

from bmfa import __version__
from bmfa.cli import bench, bench_options, commands, models, screen
from bmfa.cli.output import refuse

Options = argparse.Namespace


class Parser(argparse.ArgumentParser):
    """Refuses bad usage in one line with exit status 2, without a page of usage before it."""

    def error(self, message: str) -> NoReturn:
        """Name what was wrong and where to read on."""
        refuse(f"{message}; see {self.prog} --help")


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def build_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        prog="bmfa",
        description="Measure, bound and repair what attention loses when it is summarised coarsely.",
    )
    parser.add_argument("--version", action="version", version=f"bmfa {__version__}")
    every = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_report(every)
    _add_synthetic(every)
    _add_probe(every)
    _add_ablation(every)
    _add_closed_loop(every)
    _add_evaluate(every)
    _add_screen(every)
    _add_bench(every)
    _add_training(every)
    _add_command(
        every, "info", commands.info, "versions, devices and backends, and why one is missing"
    )
    return parser


def _add_command(
    every: Commands, name: str, run: Callable[[Options], None], summary: str
) -> Parser:
    """A command with the options that all commands share."""
    command = every.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
    )
    command.set_defaults(run=run, shared=False)
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


def _add_report(every: Commands) -> None:
    command = _add_command(
        every, "report", commands.report, "the evidence chain on one self-contained page"
    )
    command.add_argument(
        "--output", default="report", metavar="DIR", help="where page and records go (report)"
    )
    command.add_argument(
        "--records",
        nargs="+",
        metavar="FILE",
        help="make the page from these records and run nothing",
    )
    command.add_argument("--png", action="store_true", help="write every figure as PNG too")
    for dataset in ("coco", "lvis"):
        command.add_argument(
            f"--{dataset}",
            nargs=2,
            metavar=("ANNOTATIONS", "IMAGES"),
            help=f"add the probe of a {dataset.upper()} file and its folder or zip of pictures",
        )
    command.add_argument(
        "--imagenet",
        metavar="DIR",
        help="add the model chapters on these pictures, in folders by class; needs --weights",
    )
    command.add_argument("--weights", metavar="FILE", help="weights of the model for --imagenet")
    command.add_argument(
        "--model",
        default="timm:deit_tiny_patch16_224",
        metavar="NAME",
        help="the model for --imagenet (timm:deit_tiny_patch16_224, the paper's)",
    )
    command.add_argument("--labels", metavar="FILE", help="labels of a flat folder of --imagenet")
    command.add_argument(
        "--limit", type=int, default=100, metavar="N", help="pictures of --imagenet (100)"
    )
    _add_workers(command)


def _add_synthetic(every: Commands) -> None:
    command = _add_command(
        every,
        "synthetic",
        commands.synthetic,
        "the stress test: 396 bright minorities on a 16x16 grid, wherever they lie",
    )
    _add_methods(command)
    command.add_argument(
        "--placement",
        action="append",
        metavar="NAME",
        help="corner, shifted-1-1, shifted-4-4, centred or scattered; repeat for more; all without",
    )
    command.add_argument("--max-depth", type=int, default=4, metavar="D", help="depth limit (4)")
    command.add_argument(
        "--scatter-seeds", type=int, default=200, metavar="N", help="scattered masks (200)"
    )
    command.add_argument(
        "--curve", action="store_true", help="the failure curve at 4 and 1 cells, not the sweep"
    )


def _add_probe(every: Commands) -> None:
    command = _add_command(
        every, "probe", commands.probe, "the mass each method loses on instances of real pictures"
    )
    _add_source(command)
    _add_methods(command)
    command.add_argument("--grid", type=int, default=16, metavar="N", help="N x N cells (16)")
    command.add_argument("--strict", action="store_true", help="stop at the first bad instance")
    command.set_defaults(shared=True)
    _add_resume(command)


def _add_ablation(every: Commands) -> None:
    command = _add_command(
        every, "ablation", commands.ablation, "epsilon, depth, grid and look-ahead, one at a time"
    )
    _add_source(command)


def _add_closed_loop(every: Commands) -> None:
    command = _add_command(
        every, "closed-loop", models.closed_loop, "a model's outputs with its attention screened"
    )
    _add_methods(command)
    _add_pictures(command)
    command.add_argument(
        "--layers",
        action="append",
        metavar="CHOICE",
        help="all, last-K or indices such as 8,9,10; repeat for more (last-4)",
    )


def _add_evaluate(every: Commands) -> None:
    command = _add_command(
        every, "evaluate", models.evaluate, "accuracy, cost and speed of a model, method by method"
    )
    command.add_argument(
        "--method",
        action="append",
        metavar="NAME:VALUE",
        help="full, a rule as optimal:0.002 or a reduction as free-energy:8; repeat for more; "
        "a choice of them without it",
    )
    _add_pictures(command)
    command.add_argument(
        "--layers",
        default="last-4",
        metavar="CHOICE",
        help="of the rules: all, last-K or indices such as 8,9,10 (last-4)",
    )
    command.add_argument("--amp", action="store_true", help="run the model under autocast")
    command.add_argument(
        "--dtype", metavar="NAME", help="cast the model: float32 (the default), float16, bfloat16"
    )
    command.add_argument(
        "--repeats",
        type=int,
        default=5,
        metavar="N",
        help="timings of which the median counts, 0 for none (5)",
    )


def _add_pictures(command: Parser) -> None:
    """A model and the pictures it runs over, in processes that share them."""
    command.set_defaults(shared=True)
    command.add_argument(
        "--model",
        default="embedded",
        metavar="NAME",
        help="embedded (the default), timm:NAME, hf:NAME or a folder that transformers saved",
    )
    command.add_argument(
        "--weights", metavar="FILE", help="weights of the model: safetensors or a state dict"
    )
    command.add_argument(
        "--data-dir",
        metavar="DIR",
        help="pictures in folders by class index or WordNet id; the embedded ones without",
    )
    command.add_argument("--labels", metavar="FILE", help="labels of a flat folder of pictures")
    command.add_argument("--crop-pct", type=float, metavar="P", help="share of the picture kept")
    command.add_argument("--img-size", type=int, metavar="N", help="pixels of the model's input")
    command.add_argument(
        "--batch-size", type=int, default=25, metavar="N", help="pictures at once (25)"
    )
    command.add_argument("--limit", type=int, metavar="N", help="only the first N pictures")
    command.add_argument("--strict", action="store_true", help="stop at an unreadable picture")
    command.add_argument(
        "--workers", type=int, metavar="N", help="threads that read ahead (those a GPU keeps busy)"
    )
    _add_resume(command)


def _add_resume(command: Parser) -> None:
    command.add_argument(
        "--resume",
        metavar="FILE",
        help="partial results to continue from, created where missing",
    )


def _add_screen(every: Commands) -> None:
    command = _add_command(
        every, "screen", screen.screen, "one picture: a query's attention, its tree and certificate"
    )
    command.add_argument(
        "picture", metavar="PICTURE", help="a picture file, or embedded:N for the N-th embedded one"
    )
    command.add_argument(
        "--model",
        default="embedded",
        metavar="NAME",
        help="embedded (the default), timm:NAME, hf:NAME or a folder that transformers saved",
    )
    command.add_argument("--weights", metavar="FILE", help="weights of the model: safetensors")
    command.add_argument("--layer", type=int, metavar="L", help="layer to look at, from 0 (last)")
    command.add_argument(
        "--head", type=int, metavar="H", help="head, from 0 (the one whose mean loses most)"
    )
    command.add_argument(
        "--query", default="class", metavar="TOKEN", help="class (the default) or ROW,COLUMN"
    )
    command.add_argument(
        "--method",
        action="append",
        metavar="NAME:VALUE",
        help="a rule such as quadrant-gap:0.8; repeat for more (optimal:0.002)",
    )
    command.add_argument(
        "--layers",
        default="last-4",
        metavar="CHOICE",
        help="screened for the class it says: all or last-K (last-4)",
    )
    command.add_argument("--crop-pct", type=float, metavar="P", help="share of the picture kept")
    command.add_argument("--img-size", type=int, metavar="N", help="pixels of the model's input")
    command.add_argument(
        "--output", default="screen.png", metavar="FILE.png", help="the figure (screen.png)"
    )


def _add_training(every: Commands) -> None:
    command = _add_command(
        every, "train-embedded", commands.train_embedded, "train the embedded model from scratch"
    )
    command.add_argument(
        "--output", default="embedded.safetensors", metavar="FILE", help="where the weights go"
    )
    command.add_argument("--steps", type=int, metavar="N", help="steps (those of the shipped file)")
    command.add_argument(
        "--resume", metavar="FILE", help="checkpoint to continue from, created where missing"
    )
    command.set_defaults(seed=None)


def _add_source(command: Parser) -> None:
    """Instances: of a COCO or LVIS file, or the embedded pictures."""
    command.add_argument(
        "--dataset",
        choices=("embedded", "coco", "lvis"),
        default="embedded",
        help="embedded needs no files (the default)",
    )
    command.add_argument(
        "--mode", choices=("image-edge", "mask-only"), default="image-edge", help="score field"
    )
    command.add_argument("--annotations", metavar="FILE", help="instances in COCO or LVIS form")
    command.add_argument("--images", metavar="DIR", help="folder or zip with the pictures")
    command.add_argument(
        "--img-size", type=int, default=256, metavar="N", help="pixels of a resized crop (256)"
    )
    command.add_argument("--limit", type=int, metavar="N", help="only the first N instances")
    _add_workers(command)


def _add_workers(command: Parser) -> None:
    command.add_argument(
        "--workers", type=int, metavar="N", help="processes that read pictures (the cores)"
    )


def _add_bench(every: Commands) -> None:
    summary = "speed and error, each with its baseline of the same run"
    command = every.add_parser(
        "bench", help=summary, description=f"{summary[0].upper()}{summary[1:]}."
    )
    kinds = command.add_subparsers(metavar="WHAT", required=True)
    trees = _add_command(
        kinds,
        "trees",
        commands.bench_trees,
        "trees against the queue-based oracle, and against softmax",
    )
    _add_methods(trees)
    trees.add_argument("--grids", type=int, default=36_000, metavar="N", help="16x16 grids (36000)")
    trees.add_argument(
        "--batch-size", type=int, default=64, metavar="N", help="pictures of the softmax part (64)"
    )
    trees.add_argument(
        "--repeats", type=int, default=7, metavar="N", help="timings of which the median counts (7)"
    )
    attention = _add_command(
        kinds,
        "attention",
        bench.attention,
        "tiled attention against the best dense path, on real q, k, v, over the number of tokens",
    )
    bench_options.add_attention(attention)
    model = _add_command(
        kinds,
        "model",
        bench.model,
        "a model at high resolution, screened and on its best dense path, end to end",
    )
    bench_options.add_model(model)
