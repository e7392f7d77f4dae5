"""Qualitative cases: a few instances of different shapes with their pictures, scores and trees."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bmfa import energy
from bmfa.checks import check_integer
from bmfa.data import ProbeBlock, ProbeSettings, Tally
from bmfa.data.instances import InstanceSource
from bmfa.data.probes import Mode, probe_blocks
from bmfa.evidence.pictures.thumbnails import jpeg_uri
from bmfa.evidence.probes.measure import (
    PROTOCOL,
    TAU,
    check_any_instances,
    describe_source,
    score_grids,
)
from bmfa.evidence.probes.run import check_probe
from bmfa.evidence.runner import Progress
from bmfa.grid import Grid
from bmfa.packages import load_package
from bmfa.records import Record, Row
from bmfa.trees.build import screen
from bmfa.trees.rules import parse
from bmfa.trees.tree import Tree

ALGORITHM = "gamma:0.005"
# Shapes in the order of choice, by their names in the embedded set, with their words in titles. The
# root of the first should never be split.
KINDS = {
    "ring": "closed contour",
    "thin": "thin",
    "elongated": "elongated",
    "compound": "compound",
}
PICTURE_SIDE = 160  # pixels
PICTURE_BYTES = 9000


def run(
    source: InstanceSource,
    *,
    dataset: str,
    mode: Mode = "image-edge",
    count: int = 4,
    methods: Sequence[str] = (ALGORITHM, "optimal:0.001"),
    settings: ProbeSettings | None = None,
    limit: int | None = 1000,
    workers: int = 1,
    progress: Progress | None = None,
    seed: int = 0,
) -> Record:
    """Choose some instances and record their scores and the trees of every method.

    The choice depends on the source alone: a closed contour whose root Algorithm 1 never splits,
    then a thin, an elongated and a compound object, and so on in turn.

    Args:
        source: Annotated pictures.
        dataset: `"coco"`, `"lvis"` or `"embedded"`.
        mode: How scores are built: `"image-edge"` or `"mask-only"`.
        count: Number of instances.
        methods: Names of rules.
        settings: Grid and picture size.
        limit: Number of instances to choose from.
        workers: Worker processes; 1 builds the grids in this process.
        progress: Called with the pictures done and their number.
        seed: Seed of random rules.

    Returns:
        A record of one row for each instance and method.

    Raises:
        ValueError: If an argument is not valid, or no instance can be used.
    """
    settings = settings or ProbeSettings()
    rules = {name: parse(name, seed) for name in methods}
    check_probe(dataset, mode, methods, settings, seed)
    check_integer("count", count, low=1)
    tally = Tally()
    blocks = list(
        probe_blocks(source, settings, workers=workers, limit=limit, tally=tally, progress=progress)
    )
    check_any_instances(sum(map(len, blocks)), tally)
    probes = _concatenate(blocks)
    scores = score_grids([probes], mode)
    choices = _choose(probes, scores, count)
    scores = scores[[choice.index for choice in choices]]
    trees = {name: screen(scores, _grid(probes), rule, tau=TAU) for name, rule in rules.items()}
    rows = _rows(source, probes, choices, scores, trees)
    recorded = {
        "dataset": dataset,
        "mode": mode,
        "count": count,
        "methods": list(rules),
        **asdict(settings),
        "tau": TAU,
        "limit": limit,
        "workers": workers,
        "seed": seed,
        "protocol": PROTOCOL,
        **describe_source(source, tally),
    }
    return Record("cases", recorded, [{"dataset": dataset, **row} for row in rows])


@dataclass(frozen=True)
class Choice:
    """An instance by its index among the probes, and its shape."""

    index: int
    kind: str
    root_split: bool

    def title(self, category: str) -> str:
        """Return a title of category and shape; embedded categories are shapes themselves."""
        words = [category] if category == self.kind else [category, KINDS[self.kind]]
        return ", ".join(words if self.root_split else [*words, "root never split"])


def _concatenate(blocks: Sequence[ProbeBlock]) -> ProbeBlock:
    def join(values: list[Any]) -> Any:
        if isinstance(values[0], np.ndarray):
            return np.concatenate(values)
        return tuple(one for value in values for one in value)

    names = ProbeBlock.__dataclass_fields__
    return ProbeBlock(*(join([getattr(block, name) for block in blocks]) for name in names))


def _choose(probes: ProbeBlock, scores: Tensor, count: int) -> list[Choice]:
    """Choose the best instance of each shape in turn, none twice.

    The keys in descending order: the root is split or not as wanted, the category names the shape,
    the instance is not small, the category is new, and the measure of the shape.
    """
    tree = screen(scores, _grid(probes), parse(ALGORITHM), tau=TAU)
    split, shapes = tree.split[0].numpy(), _shapes(probes)
    category, small = np.array(probes.category), np.array(probes.size) == "small"
    taken = np.zeros(len(probes), dtype=bool)
    choices: list[Choice] = []
    for kind in islice(cycle(KINDS), min(count, len(probes))):
        seen = np.isin(category, category[taken])
        unwanted = split == (kind == "ring")
        keys = (-shapes[kind], seen, small, category != kind, unwanted, taken)
        index = int(np.lexsort(keys)[0])
        taken[index] = True
        choices.append(Choice(index, kind, bool(split[index])))
    return choices


def _shapes(probes: ProbeBlock) -> dict[str, NDArray[np.float64]]:
    """Return a measure of each shape for every instance, from its contour cells and its area."""
    cells = probes.minority.sum((1, 2))
    left, top, right, bottom = probes.box.T
    covered = probes.area / ((right - left) * (bottom - top))
    return {
        "ring": _enclosed(probes.minority),
        "thin": cells / np.maximum(covered, 1e-9),
        "elongated": _elongation(probes.minority),
        "compound": cells.astype(np.float64),
    }


def _enclosed(minority: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Count the cells that the contour separates from the border of the grid."""
    outside = np.pad(np.zeros_like(minority), ((0, 0), (1, 1), (1, 1)), constant_values=True)
    free = np.pad(~minority, ((0, 0), (1, 1), (1, 1)), constant_values=True)
    before = np.zeros_like(outside)
    while (outside != before).any():
        before, grown = outside, outside.copy()
        grown[:, 1:] |= outside[:, :-1]
        grown[:, :-1] |= outside[:, 1:]
        grown[:, :, 1:] |= outside[:, :, :-1]
        grown[:, :, :-1] |= outside[:, :, 1:]
        outside = grown & free
    enclosed: NDArray[np.float64] = (free & ~outside).sum((1, 2), dtype=np.float64)
    return enclosed


def _elongation(minority: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the ratio of the principal standard deviations of the contour cells."""
    side = minority.shape[-1]
    positions = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(-1, 2)
    weight = minority.reshape(len(minority), -1) / minority.sum((1, 2))[:, None]
    away = positions - (weight @ positions)[:, None]  # (count, cells, 2)
    spread = np.einsum("bn,bni,bnj->bij", weight, away, away)
    short, long = np.linalg.eigvalsh(spread).T
    # 1 / 12 is the variance of a position within a cell.
    ratio: NDArray[np.float64] = np.sqrt((long + 1 / 12) / (short.clip(min=0) + 1 / 12))
    return ratio


def _rows(
    source: InstanceSource,
    probes: ProbeBlock,
    choices: Sequence[Choice],
    scores: Tensor,
    trees: Mapping[str, Tree],
) -> list[Row]:
    identities = [int(probes.picture_id[choice.index]) for choice in choices]
    pictures = _pictures(source, set(identities))
    rows: list[Row] = []
    for number, (choice, identity) in enumerate(zip(choices, identities, strict=True)):
        case = _case(probes, choice, scores[number])
        case["picture"] = _data_uri(pictures[identity], probes.box[choice.index].tolist())
        for name, tree in trees.items():
            rows.append(case | {"method": name} | _result(tree[number], scores[number]))
    return rows


def _case(probes: ProbeBlock, choice: Choice, scores: Tensor) -> Row:
    """Return the columns that do not depend on the method."""
    index = choice.index
    minority = torch.from_numpy(probes.minority[index]).flatten()
    mass = energy.gibbs(scores, tau=TAU)[minority].sum()
    return {
        "title": choice.title(probes.category[index]),
        "kind": choice.kind,
        "category": probes.category[index],
        "picture_id": int(probes.picture_id[index]),
        "annotation_id": int(probes.annotation_id[index]),
        "height": probes.minority.shape[1],
        "width": probes.minority.shape[2],
        "scores": [round(score, 4) for score in scores.tolist()],
        "minority_area_percent": 100 * float(minority.double().mean()),
        "gibbs_mass_percent": 100 * float(mass),
        "gap": float(energy.gap(scores, tau=TAU)),
    }


def _result(tree: Tree, scores: Tensor) -> Row:
    return {
        "boxes": tree.leaf_boxes.tolist(),
        "error": float(tree.error(scores)),
        "leaf_percent": 100 * float(tree.leaf_ratio),
    }


def _pictures(source: InstanceSource, wanted: set[int]) -> dict[int, NDArray[np.uint8]]:
    """Read some pictures again from the source, by id."""
    found: dict[int, NDArray[np.uint8]] = {}
    for part in source.parts(1):
        first = next(part.instances(Tally()), None)
        if first is not None and first.picture.id in wanted:
            found[first.picture.id] = first.picture.pixels
            if len(found) == len(wanted):
                break
    return found


def _data_uri(pixels: NDArray[np.uint8], box: Sequence[int]) -> str:
    """Return the crop of the probe, resized to a square, as a small JPEG."""
    image = load_package("PIL.Image")
    crop = image.fromarray(pixels).crop(tuple(box))
    crop = crop.resize((PICTURE_SIDE, PICTURE_SIDE), image.Resampling.BILINEAR)
    return jpeg_uri(crop, PICTURE_BYTES)


def _grid(probes: ProbeBlock) -> Grid:
    return Grid(probes.minority.shape[1], probes.minority.shape[2])
