"""bmfa tune: a plan for a model and a size, chosen on the user's images.

It is one of attention for a tolerance, or one of merging for a target of GFLOPs or of agreement.
"""

import warnings
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bmfa.cli import options as opt
from bmfa.cli.output import Output, check_file, table_of
from bmfa.packages import require_packages

DTYPES = ("float32", "float16", "bfloat16")


def tune(
    output: Output,
    model: opt.ModelOptions,
    data_dir: str | None = None,
    tolerance: float | None = None,
    measure: Literal["features", "logits"] | None = None,
    error: list[float] | None = None,
    layers: str | None = None,
    gflops: float | None = None,
    agreement: float | None = None,
    policy: str | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    minutes: float | None = None,
    dtype: str | None = None,
    repeats: int | None = None,
    save: str | None = None,
    resume: str | None = None,
    figure: str | None = None,
) -> None:
    """Settings for each layer, or tokens to merge in each block, chosen on your images.

    Args:
        data_dir (DIR): Folder or zip of images like those of the later use; embedded images by default.
        tolerance (X): Largest change of the output: 0.03 (default) is 3 % of the features.
        measure: Change of the features (default), or KL of the class scores.
        error (X): Error target to try in each layer; repeat for several.
        layers (CHOICE): Layers that may change: all (default), last-K or 8,9,10.
        gflops (X): Plan merging instead: GFLOPs of an image to stay within.
        agreement (X): Plan merging instead: 0.95 keeps the class of 95 %.
        policy (NAME): Policy of merging: free-energy (default), tome.
        batch_size (N): Images in a batch (1; 25 for merging).
        limit (N): Images to use, half of them for calibration (32 on a GPU, else 8; 512 or 128 for
            merging).
        minutes (M): About how long to tune: as many targets, then images, as there is time for.
        dtype (NAME): Cast the model: float32, float16 or bfloat16.
        repeats (N): Timings (5); their median counts.
        save (FILE.json): File for the plan, for bmfa.patch or bmfa.reduce.
        resume (FILE): Measurements to continue from; the file is created if it does not exist. Without
            it, Ctrl-C keeps them in the file of --save with .part behind its name.
        figure (FILE.png): File for the figure.
    """
    from bmfa.checks import check_integer
    from bmfa.models import tune_reduction
    from bmfa.models.plan import SCHEDULED, check_choice
    from bmfa.models.tuning import IMAGES, MORE_IMAGES, check_tolerance
    from bmfa.models.tuning import tune as tune_attention
    from bmfa.models.tuning_reduction import IMAGES as REDUCTION_IMAGES
    from bmfa.models.tuning_reduction import check_target

    merging = gflops is not None or agreement is not None
    attention = {
        "tolerance": tolerance,
        "measure": measure,
        "errors": error,
        "layers": None if layers is None else opt.parse_layers(layers),
        "repeats": repeats,
        "minutes": minutes,
    }
    _check_kind(merging, attention | {"figure": figure}, policy)
    if tolerance is not None:
        check_tolerance(tolerance, measure or "features")
    if merging:
        check_target(gflops, agreement)
        check_choice("policy", policy or "free-energy", SCHEDULED)
    for name, path, suffix in (("--save", save, ".json"), ("--figure", figure, ".png")):
        if path is not None:
            check_file(name, path, suffix)
    if figure is not None:
        require_packages(("matplotlib",), "report")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype is {dtype!r}; pass one of {', '.join(DTYPES)}")
    seed = check_integer("seed", output.seed, low=0)
    drawn = (REDUCTION_IMAGES if merging else IMAGES)["cpu"]
    drawn *= 1 if minutes is None else MORE_IMAGES
    drawn = drawn if limit is None else check_integer("limit", limit, low=2)
    images = _images(data_dir, model.model, drawn, seed, model.img_size)
    loaded = model.load()
    loaded.model.to(output.torch_device(), _dtype(dtype))
    merge = {"gflops": gflops, "agreement": agreement, "policy": policy}
    options = (merge if merging else attention) | {"batch_size": batch_size, "limit": limit}
    given = {name: value for name, value in options.items() if value is not None}
    make: Any = tune_reduction if merging else tune_attention
    part = None if save is None else Path(part_of(save))
    if part is not None and resume is None:
        part.unlink(missing_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the notes say if the plan does not hold
        plan = make(
            loaded, images, seed=seed, progress=not output.quiet, resume=resume or part, **given
        )
    if part is not None:
        part.unlink(missing_ok=True)
    record, rows, (first, *notes) = plan.to_record(), plan.table(), plan.notes()
    files: dict[str | Path, Any] = {}
    if save is not None:
        files[save] = lambda: plan.to_json().encode()
    if figure is not None:
        from bmfa.evidence.tuning.figures import tuning

        files[figure] = partial(tuning.png, record)
    columns = " ".join(rows[0])
    table = table_of(rows, columns)
    output.finish(record, columns, table=table, notes=[f"\n{first}", *notes], figures=files)


def _check_kind(merging: bool, attention: dict[str, Any], policy: str | None) -> None:
    """Raise if options of plans for attention and of plans for merging are given together."""
    options = {"errors": "error"}  # the others have the names of their arguments
    given = [options.get(name, name) for name, value in attention.items() if value is not None]
    if merging and given:
        raise ValueError(
            f"--{given[0]} is for plans of attention, and --gflops and --agreement are for plans of "
            "merging; pass one kind of them"
        )
    if policy is not None and not merging:
        raise ValueError(
            f"--policy {policy} is for plans of merging; pass --gflops X or --agreement X with it"
        )


def part_of(save: str) -> str:
    """Return the file beside that of `--save` which keeps the measurements of an interrupted run."""
    return f"{save}.part"


def _images(data_dir: str | None, model: str, count: int, seed: int, img_size: int | None) -> Any:
    """Return the folder, or `count` drawn images for the embedded model."""
    if data_dir is not None:
        require_packages(("PIL",), "images")
        return data_dir
    if model != "embedded":
        raise ValueError(f"--model {model} needs --data-dir DIR with at least two images")
    from bmfa.data.classification import EmbeddedImages
    from bmfa.models import embedded

    drawn = EmbeddedImages(count, seed, img_size or embedded.IMAGE_SIZE)
    return [embedded.preprocess(drawn[index].pixels[None])[0] for index in range(len(drawn))]


def _dtype(name: str | None) -> Any:
    import torch

    return None if name is None else getattr(torch, name)
