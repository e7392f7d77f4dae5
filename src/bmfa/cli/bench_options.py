"""Options of the benchmarks of attention and of models."""

import argparse

Command = argparse.ArgumentParser


def add_attention(command: Command) -> None:
    """Those of `bmfa bench attention`."""
    _add_common(command)
    command.add_argument(
        "--size", type=int, nargs="+", metavar="PX", help="sides of the pictures, in pixels"
    )
    command.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of tokens, squares (196 1024 4096 16384, and 65536 on a GPU)",
    )
    command.add_argument(
        "--pictures", type=int, metavar="N", help="pictures that count (4 on a GPU, else 1)"
    )
    command.add_argument(
        "--blocks", metavar="B,B,...", help="blocks of the model, from 0 (2,5,8,11)"
    )
    command.add_argument(
        "--head-dim",
        type=int,
        metavar="D",
        help="time heads of this width too, on random weights of the same model",
    )
    command.add_argument(
        "--backend", choices=("triton", "eager"), help="kernels (triton on a GPU, else eager)"
    )
    command.add_argument(
        "--peer",
        action="append",
        metavar="NAME",
        help="sparge, natten, pisa, pisa-0th or flex; those that are installed, flex only if named",
    )
    command.add_argument(
        "--no-certificate", action="store_true", help="do not time the certificate and the audit"
    )


def add_model(command: Command) -> None:
    """Those of `bmfa bench model`."""
    _add_common(command)
    command.add_argument(
        "--img-size",
        type=int,
        nargs="+",
        metavar="PX",
        help="sides of the pictures (1024 2048 4096 on a GPU, else 512)",
    )
    command.add_argument(
        "--layers", default="all", metavar="CHOICE", help="all (the default), last-K or indices"
    )
    command.add_argument(
        "--form", choices=("tiled",), help="tiles even where dense attention is faster"
    )
    command.add_argument(
        "--batch-size", type=int, default=1, metavar="N", help="pictures at once (1)"
    )


def _add_common(command: Command) -> None:
    """Which model, which pictures, which settings; and how the result is shown."""
    command.add_argument(
        "--model",
        default="embedded",
        metavar="NAME",
        help="embedded (the default) or timm:NAME, with random weights unless --weights is given; "
        "bench attention also takes random: normal q, k, v without a model",
    )
    command.add_argument("--weights", metavar="FILE", help="weights of the model")
    command.add_argument(
        "--data-dir", metavar="DIR", help="folder of pictures; embedded scenes without"
    )
    for name, words in (
        ("tiles", "shares of the tiles expanded, as 0 0.03 0.1"),
        ("leaves", "budgets: leaves as a share of the tokens"),
        ("error", "targets for E, as 0.1 0.2"),
    ):
        command.add_argument(f"--{name}", type=float, nargs="+", metavar="X", help=words)
    command.add_argument(
        "--dtype", metavar="NAME", help="bfloat16 (on a GPU), float16 or float32 (elsewhere)"
    )
    command.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help="timings of which the median counts (5; 3 on a CPU)",
    )
    command.add_argument(
        "--records",
        nargs="+",
        metavar="FILE",
        help="show the tables and figures of these records and run nothing",
    )
    command.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    command.add_argument("--figures", metavar="DIR", help="write the figures there as PNG")
