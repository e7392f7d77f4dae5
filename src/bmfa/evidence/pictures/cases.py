"""Qualitative cases: a few instances of different shape, each with its picture, scores and trees."""

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
from bmfa.data.probes import Mode, Progress, probe_blocks
from bmfa.evidence.pictures.thumbnails import jpeg_uri
from bmfa.evidence.probes.measure import (
    PROTOCOL,
    TAU,
    check_any_instances,
    describe_source,
    score_grids,
)
from bmfa.evidence.probes.run import check_probe
from bmfa.grid import Grid
from bmfa.packages import load_package
from bmfa.records import Record, Row
from bmfa.trees.build import screen
from bmfa.trees.rules import parse
from bmfa.trees.tree import Tree

ALGORITHM = "gamma:0.005"
# Kinds by the names of the embedded set, in the order of choice, and how titles call them; of the
# first, the root should never be split.
KINDS = {
    "ring": "closed contour",
    "thin": "thin",
    "elongated": "elongated",
    "compound": "compound",
}
PICTURE_SIDE = 160
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
    """Choose `count` instances among the first `limit`, and show the trees of every method on them.

    The choice depends on the source alone: a closed contour whose root Algorithm 1 never splits,
    then a thin, an elongated and a compound object, and so on in turn.
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
    probes = _joined(blocks)
    scores = score_grids([probes], mode)
    choices = _choose(probes, scores, count)
    scores = scores[[choice.place for choice in choices]]
    trees = {name: screen(scores, _grid(probes), rule, tau=TAU) for name, rule in rules.items()}
    rows = _rows(source, probes, choices, scores, trees)
    told = {
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
    return Record("cases", told, [{"dataset": dataset, **row} for row in rows])


@dataclass(frozen=True)
class Choice:
    """An instance by its place among the probes, and the shape it stands for."""

    place: int
    kind: str
    root_split: bool

    def title(self, category: str) -> str:
        """The category and what is shown; embedded categories are shapes already."""
        words = [category] if category == self.kind else [category, KINDS[self.kind]]
        return ", ".join(words if self.root_split else [*words, "root never split"])


def _joined(blocks: Sequence[ProbeBlock]) -> ProbeBlock:
    def join(values: list[Any]) -> Any:
        if isinstance(values[0], np.ndarray):
            return np.concatenate(values)
        return tuple(one for value in values for one in value)

    names = ProbeBlock.__dataclass_fields__
    return ProbeBlock(*(join([getattr(block, name) for block in blocks]) for name in names))


def _choose(probes: ProbeBlock, scores: Tensor, count: int) -> list[Choice]:
    """The best instance of each kind in turn, none twice.

    More than its shape counts that its root is split or not as wanted, that the data names it so,
    that its crop is not tiny, and that its category is new.
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
        place = int(np.lexsort(keys)[0])
        taken[place] = True
        choices.append(Choice(place, kind, bool(split[place])))
    return choices


def _shapes(probes: ProbeBlock) -> dict[str, NDArray[np.float64]]:
    """How much each instance is of each kind, from its contour cells and its area."""
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
    """Cells that the contour separates from the border of the grid."""
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
    """The longer over the shorter spread of the contour cells, about their centre."""
    side = minority.shape[-1]
    place = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(-1, 2)
    weight = minority.reshape(len(minority), -1) / minority.sum((1, 2))[:, None]
    away = place - (weight @ place)[:, None]  # (count, cells, 2)
    spread = np.einsum("bn,bni,bnj->bij", weight, away, away)
    short, long = np.linalg.eigvalsh(spread).T
    # A row of single cells still has the width of a cell.
    ratio: NDArray[np.float64] = np.sqrt((long + 1 / 12) / (short.clip(min=0) + 1 / 12))
    return ratio


def _rows(
    source: InstanceSource,
    probes: ProbeBlock,
    choices: Sequence[Choice],
    scores: Tensor,
    trees: Mapping[str, Tree],
) -> list[Row]:
    """One row for each instance and method."""
    identities = [int(probes.picture_id[choice.place]) for choice in choices]
    pictures = _pictures(source, set(identities))
    rows: list[Row] = []
    for number, (choice, identity) in enumerate(zip(choices, identities, strict=True)):
        case = _case(probes, choice, scores[number])
        case["picture"] = _data_uri(pictures[identity], probes.box[choice.place].tolist())
        for name, tree in trees.items():
            rows.append(case | {"method": name} | _result(tree[number], scores[number]))
    return rows


def _case(probes: ProbeBlock, choice: Choice, scores: Tensor) -> Row:
    """What is known of an instance whatever the method."""
    place = choice.place
    minority = torch.from_numpy(probes.minority[place]).flatten()
    mass = energy.gibbs(scores, tau=TAU)[minority].sum()
    return {
        "title": choice.title(probes.category[place]),
        "kind": choice.kind,
        "category": probes.category[place],
        "picture_id": int(probes.picture_id[place]),
        "annotation_id": int(probes.annotation_id[place]),
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
    """The pixels of some pictures by id, read again from the source until all are found."""
    found: dict[int, NDArray[np.uint8]] = {}
    for part in source.parts(1):
        first = next(part.instances(Tally()), None)
        if first is not None and first.picture.id in wanted:
            found[first.picture.id] = first.picture.pixels
            if len(found) == len(wanted):
                break
    return found


def _data_uri(pixels: NDArray[np.uint8], box: Sequence[int]) -> str:
    """The crop as the probe sees it, stretched to a square, as a small JPEG."""
    image = load_package("PIL.Image")
    crop = image.fromarray(pixels).crop(tuple(box))
    crop = crop.resize((PICTURE_SIDE, PICTURE_SIDE), image.Resampling.BILINEAR)
    return jpeg_uri(crop, PICTURE_BYTES)


def _grid(probes: ProbeBlock) -> Grid:
    return Grid(probes.minority.shape[1], probes.minority.shape[2])
