"""bmfa tune: a plan for a model, a size and a tolerance, chosen on a person's pictures."""

import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from bmfa.cli import options as opt
from bmfa.cli.output import Output, table_of
from bmfa.packages import require_packages

if TYPE_CHECKING:
    from bmfa.models import Plan

COLUMNS = "layer setting change_alone milliseconds dense_milliseconds speedup"
DTYPES = ("float32", "float16", "bfloat16")


def tune(
    *,
    json: opt.Json = None,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    quiet: opt.Quiet = False,
    model: opt.Model = "embedded",
    weights: opt.Weights = None,
    images: Annotated[
        str | None,
        opt.option("--images DIR", "Folder or zip of pictures like those of the later use."),
    ] = None,
    img_size: opt.ImgSize = None,
    crop_pct: opt.CropPct = None,
    tolerance: Annotated[
        float,
        opt.option("--tolerance X", "Largest change of the output: 0.03 is 3 % of the features."),
    ] = 0.03,
    measure: Annotated[
        Literal["features", "logits"],
        opt.option("--measure", "Relative change of the features, or KL of the class scores."),
    ] = "features",
    error: Annotated[
        list[float] | None,
        opt.option("--error X...", "Error targets to try in each layer: 0.03 0.1."),
    ] = None,
    layers: opt.Layers = "all",
    batch_size: opt.BatchSize = 1,
    limit: Annotated[
        int | None,
        opt.option(
            "--limit N", "Pictures to use: half choose, a quarter checks (32 on a GPU, else 8)."
        ),
    ] = None,
    dtype: Annotated[
        str | None, opt.option("--dtype NAME", "Cast the model: float32, float16 or bfloat16.")
    ] = None,
    repeats: Annotated[int, opt.option("--repeats N", "Timings; their median counts.")] = 5,
    save: Annotated[
        str | None, opt.option("--save FILE.json", "File for the plan, for bmfa.patch(plan=...).")
    ] = None,
    figure: Annotated[str | None, opt.option("--figure FILE.png", "File for the figure.")] = None,
) -> None:
    """Settings for each layer of a model, chosen on your pictures."""
    from bmfa.models import load_model
    from bmfa.models.tuning import ERRORS, check_tolerance
    from bmfa.models.tuning import tune as run

    check_tolerance(tolerance)
    _check_target("--save", save, ".json")
    _check_target("--figure", figure, ".png")
    if figure is not None:
        require_packages(("matplotlib",), "report")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype is {dtype!r}; pass one of {', '.join(DTYPES)}")
    pictures = _pictures(images, model, limit, seed, img_size)
    output = Output(json, quiet)
    loaded = load_model(model, weights, img_size=img_size, crop_pct=crop_pct)
    loaded.model.to(opt.resolve_device(device), _dtype(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `total_lines` says if the plan does not hold
        plan = run(
            loaded,
            pictures,
            tolerance,
            measure,
            errors=error or ERRORS,
            layers=opt.parse_layers(layers),
            batch_size=batch_size,
            limit=limit,
            seed=seed,
            repeats=repeats,
            progress=output.progress("steps") or False,
        )
    record = plan.to_record()
    files: dict[str | Path, Any] = {}
    if save is not None:
        files[save] = partial(_plan_bytes, plan)
    if figure is not None:
        from bmfa.evidence.tuning.figures import tuning

        files[figure] = partial(tuning.png, record)
    output.finish(
        record, table_of(layer_rows(plan), COLUMNS), notes=total_lines(plan), figures=files
    )


def layer_rows(plan: "Plan") -> list[dict[str, Any]]:
    """Return a row for the chosen setting of every layer."""
    dense = {s.layer: s.milliseconds for s in plan.candidates if s.error is None}
    return [
        {
            "layer": s.layer,
            "setting": s.name,
            "change_alone": format_change(plan.measure, s.change),
            "milliseconds": s.milliseconds,
            "dense_milliseconds": dense[s.layer],
            "speedup": f"{dense[s.layer] / s.milliseconds:.2f}x",
        }
        for s in plan.layers
    ]


def total_lines(plan: "Plan") -> list[str]:
    """Describe the whole model: change and time, predicted and measured."""
    change = partial(format_change, plan.measure)
    height, width = plan.img_size
    tiled = len(plan.errors)
    lines = [
        f"\n{plan.measure} at {width}x{height} px, {plan.dtype}, batches of {plan.batch_size} on "
        f"{plan.environment['device_name']}: {tiled} of {len(plan.layers)} layers attend over tiles",
        f"change: {change(plan.predicted_change)} predicted from {_count(plan.choosing)}, "
        f"{change(plan.checked_change)} measured on {_count(plan.checking, 'other ')}, tolerance "
        f"{change(plan.tolerance)}",
        _confirmation(plan),
        f"time: {plan.dense_milliseconds:.5g} ms dense, {plan.predicted_milliseconds:.5g} ms predicted "
        f"({plan.predicted_speedup:.2f}x), {plan.milliseconds:.5g} ms measured ({plan.speedup:.2f}x)",
    ]
    options = {"fastest predicted combination": plan.optimum()}
    single = plan.single_target()
    if single is not None:
        options[f"best single target predicted, error={single['error']:g}"] = single
    for name, row in options.items() if plan.errors or len(plan.checks) > 1 else ():
        if row is None:
            continue
        measured = row["measured_change"]
        checked = "not checked" if measured is None else f"{change(measured)} measured"
        speedup = plan.dense_milliseconds / row["predicted_milliseconds"]
        lines.append(
            f"{name}: {row['predicted_milliseconds']:.5g} ms ({speedup:.2f}x), "
            f"{change(row['predicted_change'])} predicted, {checked}"
        )
    if not plan.errors and not any(s.change for s in plan.candidates):
        lines.append(
            "no setting is faster than dense attention at this size: the model stays as it is"
        )
    if len(plan.checks) > 1:
        number, row = next((i, r) for i, r in enumerate(plan.checks, 1) if r["chosen"])
        lines.append(f"choice: combination {number} of {len(plan.checks)} checked, {row['why']}")
    return lines


def _confirmation(plan: "Plan") -> str:
    """Say what was measured on pictures that took no part in the choice."""
    change = partial(format_change, plan.measure)
    if not plan.confirming:
        return (
            "unseen pictures: none, because fewer than six were given; "
            f"{change(plan.expected_change)} expected"
        )
    exceeded = "" if plan.holds else "; this exceeds the tolerance: pass more pictures (--limit)"
    return (
        f"unseen pictures: {change(plan.expected_change)} expected, {change(plan.measured_change)} "
        f"measured on {plan.confirming}{exceeded}"
    )


def _count(pictures: int, kind: str = "") -> str:
    return f"{pictures} {kind}picture{'' if pictures == 1 else 's'}"


def format_change(measure: str, change: float | None) -> str:
    """Format a change: in percent for features, in nats for logits."""
    if change is None:
        return "none"
    return f"{change:.3g} nats" if measure == "logits" else f"{100 * change:.2f} %"


def _pictures(
    images: str | None, model: str, limit: int | None, seed: int, img_size: int | None
) -> Any:
    if images is not None:
        require_packages(("PIL",), "data")
        return images
    if model != "embedded":
        raise ValueError(f"--model {model} needs --images DIR with at least two pictures")
    from bmfa.data.classification import EmbeddedPictures
    from bmfa.models import embedded
    from bmfa.models.tuning import PICTURES

    drawn = EmbeddedPictures(limit or PICTURES["cpu"], seed, img_size or embedded.IMAGE_SIZE)
    return [embedded.preprocess(drawn[index].pixels[None])[0] for index in range(len(drawn))]


def _dtype(name: str | None) -> Any:
    import torch

    return None if name is None else getattr(torch, name)


def _plan_bytes(plan: "Plan") -> bytes:
    return plan.to_json().encode()


def _check_target(option: str, path: str | None, suffix: str) -> None:
    """Raise before the work if a file cannot be written to this path."""
    if path is None:
        return
    if Path(path).is_dir() or Path(path).suffix.lower() != suffix:
        raise ValueError(f"{option} {path} is not the name of a {suffix} file; pass FILE{suffix}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
