"""bmfa tune: a plan for a model and a size, chosen on the user's images.

It is one of attention for a tolerance, or one of merging for a target of GFLOPs or of agreement.
"""

import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from bmfa.cli import options as opt
from bmfa.cli.groups import option
from bmfa.cli.output import Output, table_of
from bmfa.packages import require_packages

if TYPE_CHECKING:
    from bmfa.models import Plan, ReductionPlan

COLUMNS = "layer setting change_alone milliseconds dense_milliseconds speedup"
REDUCTION_COLUMNS = "block removed tokens_left"
DTYPES = ("float32", "float16", "bfloat16")
# Values of options that are left out, and differ between the two kinds of plans or exclude each other.
TOLERANCE, MEASURE, REPEATS, POLICY = 0.03, "features", 5, "free-energy"
BATCH_SIZE, REDUCTION_BATCH_SIZE = 1, 25


def tune(
    output: Output,
    model: opt.Model = "embedded",
    weights: opt.Weights = None,
    images: Annotated[
        str | None,
        option("--images DIR", "Folder or zip of images like those of the later use."),
    ] = None,
    img_size: opt.ImgSize = None,
    crop_pct: opt.CropPct = None,
    tolerance: Annotated[
        float | None,
        option(
            "--tolerance X", "Largest change of the output: 0.03 (default) is 3 % of the features."
        ),
    ] = None,
    measure: Annotated[
        Literal["features", "logits"] | None,
        option("--measure", "Change of the features (default), or KL of the class scores."),
    ] = None,
    error: Annotated[
        list[float] | None,
        option("--error X", "Error target to try in each layer; repeat for several."),
    ] = None,
    layers: Annotated[
        str | None,
        option("--layers CHOICE", "Layers that may change: all (default), last-K or 8,9,10."),
    ] = None,
    gflops: Annotated[
        float | None,
        option("--gflops X", "Plan merging instead: GFLOPs of an image to stay within."),
    ] = None,
    agreement: Annotated[
        float | None,
        option("--agreement X", "Plan merging instead: 0.95 keeps the class of 95 %."),
    ] = None,
    policy: Annotated[
        str | None, option("--policy NAME", "Policy of merging: free-energy (default), tome.")
    ] = None,
    batch_size: Annotated[
        int | None, option("--batch-size N", "Images in a batch (1; 25 for merging).")
    ] = None,
    limit: Annotated[
        int | None,
        option(
            "--limit N",
            "Images to use, half of them for choosing (32 on a GPU, else 8; 512 or 128 for merging).",
        ),
    ] = None,
    dtype: Annotated[
        str | None, option("--dtype NAME", "Cast the model: float32, float16 or bfloat16.")
    ] = None,
    repeats: Annotated[
        int | None, option("--repeats N", "Timings (5); their median counts.")
    ] = None,
    save: Annotated[
        str | None,
        option("--save FILE.json", "File for the plan, for bmfa.patch or bmfa.reduce."),
    ] = None,
    figure: Annotated[str | None, option("--figure FILE.png", "File for the figure.")] = None,
) -> None:
    """Settings for each layer, or tokens to merge in each block, chosen on your images."""
    from bmfa.checks import check_integer
    from bmfa.models import load_model, tune_reduction
    from bmfa.models.tuning import ERRORS, IMAGES, check_tolerance
    from bmfa.models.tuning import tune as tune_attention
    from bmfa.models.tuning_reduction import IMAGES as REDUCTION_IMAGES
    from bmfa.models.tuning_reduction import check_policy, check_target

    merging = gflops is not None or agreement is not None
    attention = {
        "--tolerance": tolerance,
        "--measure": measure,
        "--error": error,
        "--layers": layers,
        "--repeats": repeats,
        "--figure": figure,
    }
    _check_kind(merging, attention, policy)
    tolerance = check_tolerance(TOLERANCE if tolerance is None else tolerance)
    if merging:
        check_target(gflops, agreement)
        check_policy(policy or POLICY)
    _check_target("--save", save, ".json")
    _check_target("--figure", figure, ".png")
    if figure is not None:
        require_packages(("matplotlib",), "report")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype is {dtype!r}; pass one of {', '.join(DTYPES)}")
    seed = check_integer("seed", output.seed, low=0)
    limit = None if limit is None else check_integer("limit", limit, low=2)
    drawn = (REDUCTION_IMAGES if merging else IMAGES)["cpu"]
    images = _images(images, model, drawn if limit is None else limit, seed, img_size)
    loaded = load_model(model, weights, img_size=img_size, crop_pct=crop_pct)
    loaded.model.to(output.torch_device(), _dtype(dtype))
    if merging:
        made = tune_reduction(
            loaded,
            images,
            policy or POLICY,
            gflops=gflops,
            agreement=agreement,
            batch_size=REDUCTION_BATCH_SIZE if batch_size is None else batch_size,
            limit=limit,
            seed=seed,
            progress=output.progress("schedules") or False,
        )
        _finish_reduction(output, made, save)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `total_lines` says if the plan does not hold
        plan = tune_attention(
            loaded,
            images,
            tolerance,
            measure or MEASURE,
            errors=error or ERRORS,
            layers="all" if layers is None else opt.parse_layers(layers),
            batch_size=BATCH_SIZE if batch_size is None else batch_size,
            limit=limit,
            seed=seed,
            repeats=REPEATS if repeats is None else repeats,
            progress=output.progress("steps") or False,
        )
    record = plan.to_record()
    files: dict[str | Path, Any] = {}
    if save is not None:
        files[save] = partial(_plan_bytes, plan)
    if figure is not None:
        from bmfa.evidence.tuning.figures import tuning

        files[figure] = partial(tuning.png, record)
    table = table_of(layer_rows(plan), COLUMNS)
    output.finish(record, COLUMNS, table=table, notes=total_lines(plan), figures=files)


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
    """Say what was measured on images that took no part in the choice."""
    change = partial(format_change, plan.measure)
    if not plan.confirming:
        return (
            "unseen images: none, because fewer than six were given; "
            f"{change(plan.expected_change)} expected"
        )
    exceeded = "" if plan.holds else "; this exceeds the tolerance: pass more images (--limit)"
    return (
        f"unseen images: {change(plan.expected_change)} expected, {change(plan.measured_change)} "
        f"measured on {plan.confirming}{exceeded}"
    )


def _finish_reduction(output: Output, plan: "ReductionPlan", save: str | None) -> None:
    """Print the table of a plan of merging, and write its files."""
    record = plan.to_record()
    files: dict[str | Path, Any] = {} if save is None else {save: partial(_plan_bytes, plan)}
    output.finish(record, REDUCTION_COLUMNS, notes=reduction_lines(plan), figures=files)


def reduction_lines(plan: "ReductionPlan") -> list[str]:
    """Describe a reduced model: its operations, its output KL and its agreement."""
    height, width = plan.img_size
    removed = sum(plan.schedule)
    target = (
        f"at most {plan.target_value:g} GFLOPs"
        if plan.target == "gflops"
        else f"an agreement of {100 * plan.target_value:.1f} %"
    )
    lines = [
        f"\n{plan.policy} at {width}x{height} px for {target}: {removed} of {plan.token_grid.size} "
        "spatial tokens are removed",
        f"operations: {plan.gflops:.4g} of {plan.full_gflops:.4g} GFLOPs "
        f"({100 * plan.gflops / plan.full_gflops:.1f} %)",
    ]
    rows = [("that chose", plan.choosing, plan.choosing_kl, plan.choosing_agreement)]
    if plan.checking:
        last = plan.checks[-1]
        rows.append(("that checked", plan.checking, last["output_kl"], last["agreement"]))
    if plan.confirming:
        rows.append(("unseen", plan.confirming, plan.output_kl, plan.agreement))
    for name, count, kl, agreement in rows:
        images = f"image{'' if count == 1 else 's'}"
        what = f"unseen {images}" if name == "unseen" else f"{images} {name}"
        lines.append(
            f"{count} {what}: {100 * agreement:.1f} % keep their class, output KL {kl:.3g} nats"
        )
    if not plan.confirming:
        lines.append("unseen images: none, because fewer than six were given")
    if not plan.holds:
        lines.append("the unseen images miss the target: pass more images (--limit)")
    if not removed:
        lines.append("no schedule with fewer operations keeps the target: the model stays as it is")
    return lines


def _count(images: int, kind: str = "") -> str:
    return f"{images} {kind}image{'' if images == 1 else 's'}"


def format_change(measure: str, change: float | None) -> str:
    """Format a change: in percent for features, in nats for logits."""
    if change is None:
        return "none"
    return f"{change:.3g} nats" if measure == "logits" else f"{100 * change:.2f} %"


def _check_kind(merging: bool, attention: dict[str, Any], policy: str | None) -> None:
    """Raise if options of plans for attention and of plans for merging are given together."""
    given = [name for name, value in attention.items() if value is not None]
    if merging and given:
        raise ValueError(
            f"{given[0]} is for plans of attention, and --gflops and --agreement are for plans of "
            "merging; pass one kind of them"
        )
    if policy is not None and not merging:
        raise ValueError(
            f"--policy {policy} is for plans of merging; pass --gflops X or --agreement X with it"
        )


def _images(images: str | None, model: str, count: int, seed: int, img_size: int | None) -> Any:
    """Return the folder, or `count` drawn images for the embedded model."""
    if images is not None:
        require_packages(("PIL",), "data")
        return images
    if model != "embedded":
        raise ValueError(f"--model {model} needs --images DIR with at least two images")
    from bmfa.data.classification import EmbeddedImages
    from bmfa.models import embedded

    drawn = EmbeddedImages(count, seed, img_size or embedded.IMAGE_SIZE)
    return [embedded.preprocess(drawn[index].pixels[None])[0] for index in range(len(drawn))]


def _dtype(name: str | None) -> Any:
    import torch

    return None if name is None else getattr(torch, name)


def _plan_bytes(plan: "Plan | ReductionPlan") -> bytes:
    return plan.to_json().encode()


def _check_target(option: str, path: str | None, suffix: str) -> None:
    """Raise before the work if a file cannot be written to this path."""
    if path is None:
        return
    if Path(path).is_dir() or Path(path).suffix.lower() != suffix:
        raise ValueError(f"{option} {path} is not the name of a {suffix} file; pass FILE{suffix}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
