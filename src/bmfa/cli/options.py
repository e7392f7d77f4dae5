"""Options that several commands share, and the values they stand for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from runpy import run_path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from bmfa.cli.output import Output, check_file
from bmfa.packages import require_packages
from bmfa.records import Record

if TYPE_CHECKING:
    from bmfa.data import InstanceSource
    from bmfa.evidence.page.plots import Figure
    from bmfa.models import LoadedModel

# Embedded images that a model command draws by default: one percent point is two of them.
EMBEDDED_IMAGES = 200
NO_LABELS = "none, because there are no class folders; pass --labels FILE for top-1"


# Earlier names of methods, still understood by `--method`.
OLD_NAMES = {"sparge-mean": "block-mean"}


def _current_names(methods: list[str] | None) -> list[str] | None:
    return methods and [OLD_NAMES.get(name) or _own_rule(name) for name in methods]


def _own_rule(name: str) -> str:
    """Register the rule of `FILE.py:CLASS:VALUE`, and return `CLASS:VALUE`; other names stay."""
    stem, is_file, method = name.partition(".py:")
    if not is_file:
        return name
    from bmfa.trees import rules

    class_name = method.partition(":")[0]
    made = run_path(f"{stem}.py", run_name=Path(stem).name).get(class_name)
    if not (isinstance(made, type) and issubclass(made, rules.Rule)):
        raise ValueError(
            f"--method {name}: {stem}.py has no subclass of bmfa.rules.Rule of the name "
            f"{class_name!r}; pass FILE.py:CLASS:VALUE"
        )
    rules.register(class_name, made)
    return method


Methods = Annotated[list[str] | None, _current_names]


def parse_layers(text: str) -> str | list[int]:
    """Return indices for `8,9,10`, and any other choice as it is."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.isdecimal() for part in parts) else text


def instance_workers(workers: int | None) -> int:
    """Return the number of processes that read instances, by default one for each core."""
    from bmfa.evidence.runner.parts import cores_per_process

    return cores_per_process() if workers is None else workers


@dataclass(frozen=True)
class Instances:
    """The options of experiments on annotated instances.

    Args:
        dataset: Instances; embedded needs no files.
        mode: What the scores are made of.
        annotations (FILE): Instances in COCO or LVIS format.
        images (DIR): Folder or zip of the images.
        img_size (PX): Side of a resized crop in pixels.
        limit (N): Use only the first N instances.
        workers (N): Processes that read images; by default according to the cores.
    """

    dataset: Literal["embedded", "coco", "lvis"] = "embedded"
    mode: Literal["image-edge", "mask-only"] = "image-edge"
    annotations: str | None = None
    images: str | None = None
    img_size: int = 256
    limit: int | None = None
    workers: int | None = None

    def source(self, seed: int) -> "InstanceSource":
        """Open the instances."""
        from bmfa.data import EmbeddedScenes, InstanceFiles

        require_packages(("PIL",), "images")
        if self.dataset == "embedded":
            if self.annotations or self.images:
                raise ValueError(
                    "--annotations and --images need --dataset coco or lvis, not embedded"
                )
            return EmbeddedScenes(seed=seed)
        if not self.annotations or not self.images:
            raise ValueError(
                f"--dataset {self.dataset} needs --annotations FILE and --images DIR; "
                "--dataset embedded needs neither"
            )
        require_packages(("PIL", "pycocotools"), "data")
        return InstanceFiles(self.annotations, self.images)


@dataclass(frozen=True)
class ModelOptions:
    """The options of every command that loads a model.

    Args:
        model (NAME): embedded, timm:NAME, hf:NAME or a folder saved by transformers.
        weights (FILE): Weights of the model: safetensors or a state dict.
        crop_pct (P): Fraction of the image that the crop keeps.
        img_size (PX): Side of the model's input in pixels.
    """

    model: str = "embedded"
    weights: str | None = None
    crop_pct: float | None = None
    img_size: int | None = None

    def load(self) -> "LoadedModel":
        """Load the model."""
        from bmfa.models import load_model

        return load_model(self.model, self.weights, img_size=self.img_size, crop_pct=self.crop_pct)

    def toy_warning(self, images: str) -> list[str]:
        """Warn if images of the user are shown to the embedded model, which knows drawn ones alone."""
        if self.model != "embedded" or self.weights is not None:
            return []
        return [
            f"warning: {images} seen by the embedded toy model, which was trained on drawn images "
            "alone, so its classes mean nothing here; pass --model timm:NAME --weights FILE for a "
            "real one"
        ]


@dataclass(frozen=True)
class LabelledData(ModelOptions):
    """A model and images with labels.

    Args:
        data_dir (DIR): Images in one folder for each class, named by class index, WordNet id, or
            anything (then sorted order counts); embedded images by default.
        labels (FILE): Labels, if the images are in one folder.
        class_map (FILE): Classes of the folders: their names in the model's order, one on each line,
            or NAME INDEX.
        batch_size (N): Images in a batch.
        limit (N): Use only the first N images.
        strict: Stop at the first unreadable image.
    """

    data_dir: str | None = None
    labels: str | None = None
    class_map: str | None = None
    batch_size: int = 25
    limit: int | None = None
    strict: bool = False

    def images(self, model: "LoadedModel", seed: int) -> Any:
        """Open the images of `--data-dir`, or draw the embedded ones for the embedded model."""
        from bmfa.data.classification import EmbeddedImages, LabelledImages
        from bmfa.evidence.model_methods import class_names

        if self.labels is not None and self.class_map is not None:
            raise ValueError(
                "--labels and --class-map both give the classes of the images; pass one of them"
            )
        if self.data_dir is not None:
            require_packages(("PIL",), "images")
            return LabelledImages(
                self.data_dir,
                self.labels,
                class_map=self.class_map,
                classes=class_names(model),
                limit=self.limit,
                strict=self.strict,
            )
        if model.name != "embedded":
            raise ValueError(f"--model {model.name} needs --data-dir DIR with images")
        for name, value in (("--labels", self.labels), ("--class-map", self.class_map)):
            if value is not None:
                raise ValueError(f"{name} needs --data-dir DIR; the embedded images have labels")
        # Drawn at the size of the model's input rather than resized: larger is sharper.
        count = EMBEDDED_IMAGES if self.limit is None else self.limit
        return EmbeddedImages(count, seed, model.preprocess.size[0])


@dataclass(frozen=True)
class ModelOnImages(LabelledData):
    """The options of experiments that torchrun divides and `--resume` continues.

    Args:
        workers (N): Processes that read images; by default according to the cores.
        resume (FILE): Partial results to continue from; the file is created if it does not exist.
        figure (FILE.png): File for the figure of the results.
    """

    workers: int | None = None
    resume: str | None = None
    figure: str | None = None

    def run(
        self,
        experiment: Callable[..., Record],
        output: Output,
        columns: str,
        drawing: "Figure",
        **options: Any,
    ) -> None:
        """Run an experiment in all processes of torchrun, and finish with its record in the first."""
        from bmfa.evidence.runner.parts import joined, own_device, rank

        if self.figure is not None:
            check_file("--figure", self.figure, ".png")
            require_packages(("matplotlib",), "report")
        device, loaded = output.torch_device(own_device), self.load()
        images = self.images(loaded, output.seed)
        with joined(device):
            record = experiment(
                loaded,
                images,
                batch_size=self.batch_size,
                seed=output.seed,
                device=device,
                workers=self.workers,
                resume=self.resume,
                progress=output.progress("images"),
                **options,
            )
            if rank() == 0:
                skipped, reasons = record.settings["skipped"], record.settings["skipped_names"]
                more = ", ..." if skipped > len(reasons) else ""
                message = f"{skipped} unreadable images skipped: {'; '.join(reasons)}{more}"
                warnings = [message] if skipped else []
                if (warning := getattr(images, "label_warning", None)) is not None:
                    warnings.append(f"warning: {warning}")
                if self.data_dir:
                    warnings += self.toy_warning("the images were")
                found = getattr(images, "label_source", None)
                found = NO_LABELS if found == "none" else found
                notes = [] if found is None else [f"labels: {found}"]
                figures: dict[str | Path, Callable[[], bytes]] = {}
                if self.figure is not None:
                    figures[self.figure] = partial(drawing.png, record)
                output.finish(record, columns, notes=notes, warnings=warnings, figures=figures)
