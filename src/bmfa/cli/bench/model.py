"""bmfa bench model."""

from typing import Annotated

from bmfa.cli import options as opt
from bmfa.cli.bench.shared import Benchmark
from bmfa.cli.groups import option
from bmfa.cli.output import Output

COLUMNS = (
    "img_size n method density_percent error_l2_percent mask_iou milliseconds speedup tiled_layers "
    "layers speedup_eager milliseconds_eager peak_mebibytes heads dim dtype batch"
)


def model(
    output: Output,
    bench: Benchmark,
    img_size: Annotated[
        list[int] | None,
        option(
            "--img-size PX",
            "Side of the images in pixels; may be repeated (1024, 2048 and 4096 on a GPU, else 512, "
            "1024 and 2048).",
        ),
    ] = None,
    layers: opt.Layers = "all",
    tiled: Annotated[
        bool, option("--tiled", "Use tiles even where dense attention is faster.")
    ] = False,
    batch_size: opt.BatchSize = 1,
    images: Annotated[
        int | None,
        option("--images N", "Images to average over; those of one batch by default."),
    ] = None,
    decoder: Annotated[
        str | None,
        option(
            "--decoder FILE",
            "Weights of the saliency decoder of the model; adds the agreement of the masks.",
        ),
    ] = None,
) -> None:
    """A model at high resolution, screened and dense, end to end."""
    from bmfa.evidence.bench import model as experiment

    if bench.show_files(output, COLUMNS):
        return
    device = output.torch_device()
    settings = experiment.Settings(
        model=bench.model,
        weights=bench.weights,
        data_dir=bench.data_dir,
        decoder=decoder,
        methods=tuple(bench.method or ()),
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
