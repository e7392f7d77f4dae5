"""bmfa report."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from bmfa import __version__
from bmfa.cli import options as opt
from bmfa.cli.groups import POSITIONAL
from bmfa.cli.output import Common
from bmfa.files import write_atomic
from bmfa.packages import require_packages
from bmfa.records import Record


def report(
    common: Common,
    output: str = "report",
    records: list[str] | None = None,
    files: Annotated[list[str] | None, POSITIONAL] = None,
    png: bool = False,
    coco: tuple[str, str] | None = None,
    lvis: tuple[str, str] | None = None,
    imagenet: str | None = None,
    weights: str | None = None,
    model: str = "timm:deit_tiny_patch16_224",
    labels: str | None = None,
    class_map: str | None = None,
    limit: int = 100,
    workers: int | None = None,
) -> None:
    """The evidence chain on one self-contained page.

    Args:
        output (DIR): Folder for the page and the records.
        records (FILE): Make the page from this record, without running any experiment; repeat for
            several. What they do not hold is left out.
        files ([FILE]...): Further files for --records.
        png: Write every figure as PNG, too.
        coco (ANNOTATIONS IMAGES): Run the probe of a COCO file and its folder or zip of images, instead
            of the recorded one.
        lvis (ANNOTATIONS IMAGES): Run the probe of an LVIS file and its folder or zip of images,
            instead of the recorded one.
        imagenet (DIR): Run the model chapters on these images, in folders by class, instead of the
            recorded ones; needs --weights.
        weights (FILE): Weights of the model for --imagenet.
        model (NAME): The model for --imagenet.
        labels (FILE): Labels, if --imagenet is one folder of images.
        class_map (FILE): Classes of the folders: their names in the model's order, one on each line,
            or NAME INDEX.
        limit (N): Number of images of --imagenet.
        workers (N): Processes that read images; by default according to the cores.
    """
    require_packages(("jinja2", "matplotlib", "PIL"), "report")
    if coco or lvis:
        require_packages(("pycocotools",), "data")
    from bmfa.evidence import recorded
    from bmfa.evidence.page import figures
    from bmfa.evidence.page.build import build_page
    from bmfa.evidence.page.origins import describe_data

    folder = Path(output)
    explorer = folder / "explorer.html"
    if paths := [*(records or ()), *(files or ())]:
        collected = _read_records(paths)
    else:
        from bmfa.evidence import report as experiments
        from bmfa.evidence.explorer.page import build_explorer

        collected = []

        def keep(name: str, record: Record, origin: str = "") -> None:
            write_atomic(folder / "records" / f"{name}.json", record.to_json())
            collected.append(record)
            if not common.quiet:
                print(f"{name}: {len(record.rows)} rows{origin}", flush=True)

        if (imagenet is None) != (weights is None):
            raise ValueError("--weights FILE and --imagenet DIR go together; pass both, or neither")
        own = None
        if imagenet is not None and weights is not None:
            own = experiments.load_own(weights, imagenet, model, labels, class_map, limit)
        device = common.torch_device()
        owned = {"coco": coco, "lvis": lvis, "model": own}
        shown, problems = recorded.load(without=[kind for kind, given in owned.items() if given])
        for name, record in experiments.run(
            seed=common.seed,
            workers=opt.instance_workers(workers),
            coco=coco,
            lvis=lvis,
            own=own,
            device=device,
        ):
            keep(name, record)
        for name, record in shown.items():
            keep(name, record, f", {describe_data([record])}")
        for problem in problems:
            print(f"bmfa: {problem}", file=sys.stderr)
        exploration = experiments.explore(own, seed=common.seed, device=device)
        write_atomic(explorer, build_explorer(exploration, report="index.html"))
    link = explorer.name if explorer.is_file() else None
    try:
        page = build_page(collected, link, only_measured=bool(paths))
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise _unusable_records(collected, error) from error
    write_atomic(folder / "index.html", page)
    for name, figure in figures.ALL.items() if png else ():
        if figure.drawable(collected):
            write_atomic(folder / "figures" / f"{name}.png", figure.png(collected))
    if not common.quiet:
        print(
            f"page: {folder / 'index.html'}", *([f"explorer: {explorer}"] if link else []), sep="\n"
        )


def _read_records(names: Sequence[str]) -> list[Record]:
    """Read the files of `--records`; say which were made by another version."""
    from bmfa.evidence import recorded

    found = [Record.from_json(Path(name).read_text("utf-8"), name) for name in names]
    for name, record in zip(names, found, strict=True):
        if record.other_version is not None:
            print(
                f"bmfa: {name} was made by bmfa {record.other_version}, and this is bmfa {__version__}; "
                "its numbers may have another meaning",
                file=sys.stderr,
            )
    return recorded.mark(found)


def _unusable_records(records: Sequence[Record], error: Exception) -> ValueError:
    """Return the error of records that have the form of a record, but not what a chapter needs."""
    others = dict.fromkeys(r.other_version for r in records if r.other_version is not None)
    made = f", made by bmfa {', '.join(map(str, others))}," if others else ""
    return ValueError(
        f"the page cannot be made of these records{made} ({type(error).__name__}: {error}); make them "
        f"again with bmfa {__version__}, or leave out the one at fault"
    )
