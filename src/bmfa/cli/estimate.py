"""bmfa estimate: what screening would bring for a model at a size, in seconds and before any tuning."""

from typing import Literal

from bmfa.cli import options as opt
from bmfa.cli.output import Output
from bmfa.packages import require_packages
from bmfa.records import Record

COLUMNS = "error milliseconds speedup slowest fastest density tiled_layers"


def estimate(
    output: Output,
    model: opt.ModelOptions,
    data_dir: str | None = None,
    error: list[float] | None = None,
    limit: int = 2,
    dtype: Literal["float32", "float16", "bfloat16"] | None = None,
) -> None:
    """The speed to expect from screening a model on this machine, and its memory, in seconds.

    Args:
        data_dir (DIR): Folder or zip of images like those of the later use; synthetic ones by default.
        error (X): Error target; repeat for several (0.01, 0.03 and 0.1).
        limit (N): Images of the folder to use.
        dtype: Cast the model.
    """
    import torch

    from bmfa.models import estimating

    if data_dir is not None:
        require_packages(("PIL",), "images")
    loaded = model.load()
    loaded.model.to(output.torch_device(), None if dtype is None else getattr(torch, dtype))
    errors = error or estimating.ERRORS
    found = estimating.estimate(loaded, data_dir, errors=errors, limit=limit, seed=output.seed)
    settings = found.to_dict()
    rows, frame = settings.pop("settings"), settings.pop("environment")
    output.finish(Record("estimate", settings, rows, frame), COLUMNS, table=str(found))
