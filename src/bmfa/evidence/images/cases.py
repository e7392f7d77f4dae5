"""Qualitative cases: the paper's four objects, and two blocks of one image, with their trees."""

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bmfa import energy
from bmfa.checks import check_integer
from bmfa.data import ProbeBlock, ProbeSettings, Tally
from bmfa.data.drawn.objects import OBJECT_CATEGORIES, OBJECT_IMAGE_SIZE, draw_kite_flyer
from bmfa.data.instances import InstanceSource
from bmfa.data.probes import Mode, probe_block, probe_blocks
from bmfa.evidence.images.thumbnails import crop_uri, square_uri
from bmfa.evidence.page import paper
from bmfa.evidence.probes.measure import (
    PROTOCOL,
    TAU,
    check_any_instances,
    describe_source,
    read_scores,
)
from bmfa.evidence.probes.run import check_probe
from bmfa.evidence.runner import Progress
from bmfa.evidence.score_methods import tree_columns
from bmfa.grid import Grid
from bmfa.records import Record, Row, environment
from bmfa.trees.build import screen
from bmfa.trees.rules import parse

# Algorithm 1 at the threshold of the paper's overview figure, and the optimal tree at a price of
# half a percent of the mass for each leaf.
ALGORITHM = f"gamma:{paper.OVERVIEW_EPSILON:g}"
METHODS = (ALGORITHM, "optimal:0.005")
IMAGE_BYTES = 9000
BLOCKS_METHOD = paper.ALGORITHM_1
SCENE_BYTES = 30_000
CHOICE = (
    "of each category, the instance with the largest gap of the mean among those whose share of "
    "minority cells lies in the range of the paper's cases and whose root Algorithm 1 splits; without "
    "such an instance, either condition is dropped"
)


def run(
    source: InstanceSource,
    *,
    dataset: str,
    mode: Mode = "image-edge",
    images: bool = True,
    limit: int | None = None,
    workers: int = 1,
    progress: Progress | None = None,
    seed: int = 0,
) -> Record:
    """Record a kite, a person, a book and a spoon: scores, trees, and the range of each category.

    The choice depends on the source alone, see `CHOICE`. Categories that the source does not have are
    left out.

    Args:
        source: Annotated images.
        dataset: `"coco"`, `"lvis"` or `"embedded"`.
        mode: How scores are built: `"image-edge"` or `"mask-only"`.
        images: False to leave the images themselves out of the record.
        limit: Number of instances to choose from.
        workers: Worker processes; 1 builds the grids in this process.
        progress: Called with the images done and their number.
        seed: Seed of random rules.

    Returns:
        A record of one row for each category and method.

    Raises:
        ValueError: If an argument is not valid, or the source has none of the four categories.

    Example:
        >>> from bmfa.data import EmbeddedObjects
        >>> record = run(EmbeddedObjects(poses=4), dataset="embedded")
        >>> [row["title"] for row in record.rows[::2]]
        ['kite', 'person', 'book', 'spoon']
    """
    settings = ProbeSettings()
    check_probe(dataset, mode, METHODS, settings, seed)
    tally = Tally()
    probes = _read_probes(source, settings, tally, limit=limit, workers=workers, progress=progress)
    scores = read_scores([probes], mode)
    measured = _measure(probes, scores)
    chosen = _choose(probes, measured)
    if not chosen:
        raise ValueError(
            f"none of the {len(probes)} instances is a {', a '.join(OBJECT_CATEGORIES)}; pass "
            "annotations that have one of these categories"
        )
    indices = list(chosen.values())
    rules = {name: parse(name, seed) for name in METHODS}
    trees = {name: screen(scores[indices], _grid(probes), r, tau=TAU) for name, r in rules.items()}
    rows: list[Row] = []
    for number, (category, index) in enumerate(chosen.items()):
        case: Row = {"dataset": dataset, "title": category, "category": category}
        case |= _score_columns(probes, scores, measured, index)
        case |= _ranges(probes, measured, category)
        if images:
            case["image"] = crop_uri(source, probes, index, IMAGE_BYTES)
        rows += [
            case | {"method": name} | tree_columns(tree[number], scores[index])
            for name, tree in trees.items()
        ]
    recorded = {
        "dataset": dataset,
        "mode": mode,
        "methods": list(METHODS),
        **asdict(settings),
        "tau": TAU,
        "limit": limit,
        "workers": workers,
        "seed": seed,
        "choice": CHOICE,
        "protocol": PROTOCOL,
        **describe_source(source, tally),
    }
    return Record("cases", recorded, rows, environment("cpu"))


def blocks(*, images: int = 24, seed: int = 0) -> Record:
    """Record two blocks of one drawn image, for a figure like the first of the paper.

    Of several images of a person and a kite, the one is chosen whose two blocks have the largest gap
    of the mean (the smaller of the two counts), among those whose roots Algorithm 1 splits.

    Args:
        images: Number of images to choose from.
        seed: Seed of the images.

    Returns:
        A record of two rows, one for each block.

    Raises:
        ValueError: If Algorithm 1 splits both roots in none of the images.

    Example:
        >>> [row["title"] for row in blocks(images=4).rows]
        ['Block 1', 'Block 2']
    """
    check_integer("images", images, low=1)
    settings = ProbeSettings()
    drawn = [draw_kite_flyer(seed, index) for index in range(images)]
    probes = probe_block([one for pair in drawn for one in pair], settings, Tally())
    assert probes is not None and len(probes) == 2 * images
    scores = read_scores([probes], "image-edge")
    measured = _measure(probes, scores, BLOCKS_METHOD)
    worse = measured["gap"].view(images, 2).amin(1)
    worse[(measured["algorithm_leaves"].view(images, 2) == 1).any(1)] = -torch.inf
    chosen = int(worse.argmax())
    if worse[chosen] < 0:
        raise ValueError(
            f"Algorithm 1 splits both roots in none of {images} images; pass more images"
        )
    pixels, side = drawn[chosen][0].image.pixels, OBJECT_IMAGE_SIZE
    scene = square_uri(pixels, (0, 0, side, side), SCENE_BYTES, side)
    both = slice(2 * chosen, 2 * chosen + 2)
    tree = screen(scores[both], _grid(probes), parse(BLOCKS_METHOD), tau=TAU)
    rows: list[Row] = []
    for number, index in enumerate(range(both.start, both.stop)):
        box = probes.box[index].tolist()
        row: Row = {"title": f"Block {number + 1}", "category": probes.category[index]}
        row |= {"scene": scene, "scene_box": [round(edge / side, 5) for edge in box]}
        row |= {"image": square_uri(pixels, box, IMAGE_BYTES), "method": BLOCKS_METHOD}
        row |= _score_columns(probes, scores, measured, index)
        rows.append(row | tree_columns(tree[number], scores[index]))
    recorded = {"dataset": "embedded", "images": images, "seed": seed, "tau": TAU}
    return Record("blocks", {**recorded, "protocol": PROTOCOL}, rows, environment("cpu"))


def _read_probes(
    source: InstanceSource, settings: ProbeSettings, tally: Tally, **options: Any
) -> ProbeBlock:
    blocks = list(probe_blocks(source, settings, tally=tally, **options))
    check_any_instances(sum(map(len, blocks)), tally)

    names = ProbeBlock.__dataclass_fields__
    columns = ([getattr(block, name) for block in blocks] for name in names)
    joined: list[Any] = [np.concatenate(column) for column in columns]
    return ProbeBlock(*joined)


# Columns that are measured for every instance, with their names in the ranges of a category.
MEASURES = {
    "minority_area_percent": "area",
    "gibbs_mass_percent": "mass",
    "gap": "gap",
    "algorithm_leaves": "leaves",
}


def _measure(probes: ProbeBlock, scores: Tensor, method: str = ALGORITHM) -> dict[str, Tensor]:
    """Return the measures of all instances, (count,) each; the leaves are those of `method`."""
    minority = torch.from_numpy(probes.minority).flatten(1)
    leaves = screen(scores, _grid(probes), parse(method), tau=TAU).leaf_count
    return {
        "minority_area_percent": 100 * minority.double().mean(1),
        "gibbs_mass_percent": 100 * (energy.gibbs(scores, tau=TAU) * minority).sum(1),
        "gap": energy.gap(scores, tau=TAU),
        "algorithm_leaves": leaves,
    }


def _choose(probes: ProbeBlock, measured: dict[str, Tensor]) -> dict[str, int]:
    """Return the index of the chosen instance of every category that the source has."""
    category = np.array(probes.category)
    area, gap = measured["minority_area_percent"].numpy(), measured["gap"].numpy()
    # The paper prints one decimal.
    outside = (area < paper.CASE_AREAS[0] - 0.05) | (area > paper.CASE_AREAS[1] + 0.05)
    unsplit = measured["algorithm_leaves"].numpy() == 1
    chosen = {}
    for name in OBJECT_CATEGORIES:
        other = category != name
        if not other.all():
            chosen[name] = int(np.lexsort((-gap, outside, unsplit, other))[0])
    return chosen


def _score_columns(
    probes: ProbeBlock, scores: Tensor, measured: dict[str, Tensor], index: int
) -> Row:
    """Return the columns of one instance that do not depend on the method."""
    return {
        "image_id": int(probes.image_id[index]),
        "annotation_id": int(probes.annotation_id[index]),
        "height": probes.minority.shape[1],
        "width": probes.minority.shape[2],
        "scores": [round(score, 4) for score in scores[index].tolist()],
        **{name: values[index].item() for name, values in measured.items()},
    }


def _ranges(probes: ProbeBlock, measured: dict[str, Tensor], category: str) -> Row:
    """Return the number of instances of a category, and the range of every measure over them."""
    members = torch.tensor([name == category for name in probes.category])
    row: Row = {"instances": int(members.sum())}
    unsplit = measured["algorithm_leaves"][members] == 1
    row["unsplit_percent"] = 100 * float(unsplit.double().mean())
    for name, short in MEASURES.items():
        values = measured[name][members].double()
        row |= {f"{short}_low": float(values.min()), f"{short}_high": float(values.max())}
    return row


def _grid(probes: ProbeBlock) -> Grid:
    return Grid(probes.minority.shape[1], probes.minority.shape[2])
