"""bmfa bench model."""

from bmfa.cli import options as opt
from bmfa.cli.bench.shared import Benchmark
from bmfa.cli.output import Output

COLUMNS = (
    "img_size n method density_percent error_l2_percent mask_iou milliseconds speedup tiled_layers "
    "layers speedup_eager milliseconds_eager peak_mebibytes heads dim dtype batch"
)


def model(
    output: Output,
    bench: Benchmark,
    img_size: list[int] | None = None,
    plan: str | None = None,
    layers: str = "all",
    tiled: bool = False,
    batch_size: int = 1,
    images: int | None = None,
    decoder: str | None = None,
) -> None:
    """A model at high resolution, screened and dense, end to end.

    Args:
        img_size (PX): Side of the images in pixels; may be repeated (1024, 2048 and 4096 on a GPU, else
            512, 1024 and 2048).
        plan (FILE): Plan of bmfa tune, at its size if no other is given.
        layers (CHOICE): Screened layers: all, last-K or indices such as 8,9,10.
        tiled: Use tiles even where dense attention is faster.
        batch_size (N): Images in a batch.
        images (N): Images to average over; those of one batch by default.
        decoder (FILE): Weights of the saliency decoder of the model; adds the agreement of the masks.
    """
    from bmfa.evidence.bench import model as experiment
    from bmfa.evidence.model_methods import PLAN
    from bmfa.models import Plan

    if bench.show_files(output, COLUMNS):
        return
    device, methods = output.torch_device(), tuple(bench.method or ())
    if plan is not None:
        methods = (*methods, f"{PLAN}{plan}")
        img_size = img_size or [Plan.load(plan).img_size[0]]
    settings = experiment.Settings(
        model=bench.model,
        weights=bench.weights,
        data_dir=bench.data_dir,
        decoder=decoder,
        methods=methods,
        layers=opt.parse_layers(layers),
        allow_dense=not tiled,
        batch_size=batch_size,
        images=images,
        dtype=bench.dtype,
        device=device,
        repeats=bench.timings(device),
        seed=output.seed,
    )
    record = experiment.run(settings, img_size or (), output.progress("sizes"))
    bench.show(output, record, COLUMNS)
