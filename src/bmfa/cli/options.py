"""Options that several commands share, and the values they stand for."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from bmfa.packages import require_packages

if TYPE_CHECKING:
    from bmfa.data import InstanceSource
    from bmfa.models import LoadedModel

# Embedded images that a model command draws by default: one percent point is two of them.
EMBEDDED_IMAGES = 200


# Earlier names of methods, still understood by `--method`.
OLD_NAMES = {"sparge-mean": "block-mean"}


def option(usage: str, help: str, **more: Any) -> Any:
    """Declare an option as its help page shows it, for example `option("--limit N", "...")`."""
    name, _, metavar = usage.partition(" ")
    return Option(name, metavar=metavar or None, help=help, **more)


def _current_names(methods: list[str] | None) -> list[str] | None:
    return methods and [OLD_NAMES.get(name, name) for name in methods]


Json = Annotated[
    str | None, option("--json FILE", "Write the record to FILE; - is standard output.")
]
Seed = Annotated[int, option("--seed N", "Seed of all random numbers.")]
Device = Annotated[
    str,
    option("--device NAME", "auto (CUDA if available, else the CPU), cpu, cuda, cuda:1 or mps."),
]
Csv = Annotated[
    str | None, option("--csv FILE", "Write the rows as CSV to FILE; - is standard output.")
]
Wide = Annotated[bool, option("--wide", "Print every column; by default at most 120 characters.")]
Quiet = Annotated[bool, option("--quiet", "Print no table and no progress.")]

Methods = Annotated[
    list[str] | None,
    option(
        "--method NAME:VALUE",
        "Method such as gamma:0.005; repeat for several. Without this option, a default list runs. "
        "The methods are listed at the end of this page.",
        callback=_current_names,
    ),
]
Model = Annotated[
    str, option("--model NAME", "embedded, timm:NAME, hf:NAME or a folder saved by transformers.")
]
Weights = Annotated[
    str | None, option("--weights FILE", "Weights of the model: safetensors or a state dict.")
]
DataDir = Annotated[
    str | None,
    option(
        "--data-dir DIR",
        "Images in one folder for each class, named by class index, WordNet id, or anything (then "
        "sorted order counts); embedded images by default.",
    ),
]
ClassMap = Annotated[
    str | None,
    option(
        "--class-map FILE",
        "Classes of the folders: their names in the model's order, one on each line, or NAME INDEX.",
    ),
]
Labels = Annotated[str | None, option("--labels FILE", "Labels, if the images are in one folder.")]
CropPct = Annotated[
    float | None, option("--crop-pct P", "Fraction of the image that the crop keeps.")
]
ImgSize = Annotated[int | None, option("--img-size PX", "Side of the model's input in pixels.")]
BatchSize = Annotated[int, option("--batch-size N", "Images in a batch.")]
Limit = Annotated[int | None, option("--limit N", "Use only the first N images.")]
Strict = Annotated[bool, option("--strict", "Stop at the first unreadable image.")]
Workers = Annotated[
    int | None,
    option("--workers N", "Processes that read images; by default according to the cores."),
]
Resume = Annotated[
    str | None,
    option(
        "--resume FILE",
        "Partial results to continue from; the file is created if it does not exist.",
    ),
]
Layers = Annotated[
    str, option("--layers CHOICE", "Screened layers: all, last-K or indices such as 8,9,10.")
]

Dataset = Annotated[
    Literal["embedded", "coco", "lvis"], option("--dataset", "Instances; embedded needs no files.")
]
Mode = Annotated[
    Literal["image-edge", "mask-only"], option("--mode", "What the scores are made of.")
]
Annotations = Annotated[
    str | None, option("--annotations FILE", "Instances in COCO or LVIS format.")
]
Images = Annotated[str | None, option("--images DIR", "Folder or zip of the images.")]
CropSize = Annotated[int, option("--img-size PX", "Side of a resized crop in pixels.")]
InstanceLimit = Annotated[int | None, option("--limit N", "Use only the first N instances.")]


def resolve_device(name: str, *, multi_process: bool = False) -> str:
    """Return the torch device that `--device` stands for.

    Args:
        name: `auto`, or the name of a torch device.
        multi_process: give every process of torchrun a CUDA device of its own.

    Raises:
        ValueError: the device cannot be used on this machine.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if multi_process:
        from bmfa.evidence.runner.parts import own_device

        name = own_device(name)
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} is not usable ({reason}); pass --device cpu") from None
    return name


def parse_layers(text: str) -> str | list[int]:
    """Return indices for `8,9,10`, and any other choice as it is."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.isdecimal() for part in parts) else text


def instance_source(
    dataset: str, annotations: str | None, images: str | None, seed: int
) -> "InstanceSource":
    """Open the instances of `--dataset`, `--annotations` and `--images`."""
    from bmfa.data import EmbeddedScenes, InstanceFiles

    require_packages(("PIL",), "data")
    if dataset == "embedded":
        if annotations or images:
            raise ValueError("--annotations and --images need --dataset coco or lvis, not embedded")
        return EmbeddedScenes(seed=seed)
    if not annotations or not images:
        raise ValueError(
            f"--dataset {dataset} needs --annotations FILE and --images DIR; "
            "--dataset embedded needs neither"
        )
    require_packages(("PIL", "pycocotools"), "data")
    return InstanceFiles(annotations, images)


def instance_workers(workers: int | None) -> int:
    """Return the number of processes that read instances, by default one for each core."""
    from bmfa.evidence.runner.parts import cores_per_process

    return cores_per_process() if workers is None else workers


def labelled_images(
    data_dir: str | None,
    *,
    model: "LoadedModel",
    labels: str | None,
    limit: int | None,
    strict: bool,
    seed: int,
    class_map: str | None = None,
) -> Any:
    """Open the images of `--data-dir`, or draw the embedded ones for the embedded model."""
    from bmfa.data.classification import EmbeddedImages, LabelledImages
    from bmfa.evidence.model_methods import class_names

    if labels is not None and class_map is not None:
        raise ValueError(
            "--labels and --class-map both give the classes of the images; pass one of them"
        )
    if data_dir is not None:
        require_packages(("PIL",), "data")
        return LabelledImages(
            data_dir,
            labels,
            class_map=class_map,
            classes=class_names(model),
            limit=limit,
            strict=strict,
        )
    if model.name != "embedded":
        raise ValueError(f"--model {model.name} needs --data-dir DIR with images")
    for option_name, value in (("--labels", labels), ("--class-map", class_map)):
        if value is not None:
            raise ValueError(f"{option_name} needs --data-dir DIR; the embedded images have labels")
    # Drawn at the size of the model's input rather than resized: larger is sharper.
    count = EMBEDDED_IMAGES if limit is None else limit
    return EmbeddedImages(count, seed, model.preprocess.size[0])


def image_notes(images: Any) -> list[str]:
    """Describe how the classes of the folders were found; nothing for the embedded images."""
    source = getattr(images, "label_source", None)
    if source is None:
        return []
    none = "labels: none, because there are no class folders; pass --labels FILE for top-1"
    return [none if source == "none" else f"labels: {source}"]


def image_warnings(settings: Any, images: Any) -> list[str]:
    """Describe the images that could not be read, and labels that may not be the model's."""
    from bmfa.data.classification import SkippedImages

    skipped = SkippedImages(settings["skipped"], settings["skipped_names"]).lines()
    warning = getattr(images, "label_warning", None)
    return [*skipped, *([] if warning is None else [f"warning: {warning}"])]


def toy_model_warning(model: str, weights: str | None, images: str) -> list[str]:
    """Warn if images of the user are shown to the embedded model, which knows drawn ones alone."""
    if model != "embedded" or weights is not None:
        return []
    return [
        f"warning: {images} seen by the embedded toy model, which was trained on drawn images "
        "alone, so its classes mean nothing here; pass --model timm:NAME --weights FILE for a real one"
    ]
