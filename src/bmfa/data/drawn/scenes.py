"""The embedded picture set, seen as scenes: several objects with masks over a textured ground."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bmfa.data.drawn.clutter import Disc, add_clutter, is_free
from bmfa.data.drawn.draws import Draws
from bmfa.data.drawn.objects import KINDS
from bmfa.data.drawn.shapes import Array, Shape, reach
from bmfa.data.drawn.textures import background, contrasting, finished, luma_at, texture
from bmfa.data.instances import Instance, Picture, Tally

SCENE_HEIGHT, SCENE_WIDTH = 288, 384
_VIEW = 1
_MOST_OBJECTS = 8
_PLACES = 12


class _Object(NamedTuple):
    """A shape of some kind, and a disc (x, y, radius) that holds it."""

    kind: str
    disc: Disc
    shape: Shape


def scene(seed: int, index: int) -> list[Instance]:
    """The instances of the scene of (seed, index); their masks do not overlap."""
    draws = Draws(seed, index, _VIEW)
    canvas = background(draws, SCENE_HEIGHT, SCENE_WIDTH, strength=2.0)
    objects = _objects(draws)
    add_clutter(draws, canvas, [], tries=130)
    for one in objects:
        one.shape.paint(canvas, _surface(draws, canvas, one))
    picture = Picture(index, f"{index:012d}.png", finished(canvas))
    return [_instance(picture, number, one) for number, one in enumerate(objects)]


def _objects(draws: Draws) -> list[_Object]:
    """Objects in discs that do not meet; those that find no free place are left out."""
    planned = [_planned(draws) for _ in range(_MOST_OBJECTS)]
    objects: list[_Object] = []
    # The largest first: they would find no place later.
    for kind, radius in sorted(planned, key=lambda plan: -plan[1]):
        strokes, turn = KINDS[kind].make(draws), draws.number()
        disc = _free_disc(draws, radius * reach(strokes), [one.disc for one in objects])
        if disc is not None:
            placed = [stroke.placed(np.array(disc[:2]), radius, turn) for stroke in strokes]
            objects.append(_Object(kind, disc, Shape.of(placed, SCENE_HEIGHT, SCENE_WIDTH)))
    return objects


def _planned(draws: Draws) -> tuple[str, float]:
    """A kind, each as often as its share says, and a radius, spread evenly on a log scale."""
    place, size = draws.number(), draws.number()
    bounds = np.cumsum([kind.share for kind in KINDS.values()])
    kind = tuple(KINDS)[int((place >= bounds[:-1]).sum())]
    low, high = KINDS[kind].radius
    return kind, low * (high / low) ** size


def _free_disc(draws: Draws, radius: float, taken: list[Disc]) -> Disc | None:
    """A free place for a disc, its centre within the picture by at least two thirds of the radius."""
    margin = radius / 1.5
    for x, y in draws.array(_PLACES, 2).tolist():
        disc = (
            margin + x * (SCENE_WIDTH - 2 * margin),
            margin + y * (SCENE_HEIGHT - 2 * margin),
            radius + 2,
        )
        if is_free(disc, taken):
            return disc
    return None


def _surface(draws: Draws, canvas: Array, one: _Object) -> Array:
    """An object's colours, (3, rows, columns): a contrast to the ground, a texture and a shade."""
    rows, columns = one.shape.distance.shape
    colour = contrasting(draws, luma_at(canvas, np.array([one.disc[:2]])), 8.0, 80.0)[0]
    relief = draws.number(10.0, 50.0) * texture(draws, rows, columns)
    relief += draws.number(-14.0, 14.0) * np.linspace(-1.0, 1.0, columns)
    relief += draws.number(-14.0, 14.0) * np.linspace(-1.0, 1.0, rows)[:, None]
    surface: Array = colour + relief
    return surface


def _instance(picture: Picture, number: int, one: _Object) -> Instance:
    mask = one.shape.mask(SCENE_HEIGHT, SCENE_WIDTH)
    identity = picture.id * _MOST_OBJECTS + number + 1
    return Instance(picture, identity, one.kind, None, float(mask.sum()), False, mask)


@dataclass(frozen=True)
class EmbeddedScenes:
    """Scenes of one seed as a source of instances, made when they are read; 120 hold 600 or so."""

    pictures: int = 120
    seed: int = 0
    start: int = 0

    def __len__(self) -> int:
        return self.pictures

    def parts(self, instances: int = 128) -> Iterator["EmbeddedScenes"]:
        """The same scenes in order, in sources of about so many instances."""
        step = max(1, instances // _MOST_OBJECTS)
        for first in range(0, self.pictures, step):
            pictures = min(step, self.pictures - first)
            yield EmbeddedScenes(pictures, self.seed, self.start + first)

    def instances(self, tally: Tally | None = None) -> Iterator[Instance]:
        """Every instance, picture by picture; all are usable."""
        for index in range(self.start, self.start + self.pictures):
            yield from scene(self.seed, index)
