"""Embedded images: equal bits everywhere, balanced, within their stated sizes, read back exactly."""

import hashlib
from collections.abc import Iterable

import numpy as np
import pytest

from bmfa.data import (
    BADGE_CLASSES,
    EmbeddedImages,
    EmbeddedObjects,
    EmbeddedScenes,
    Instance,
    draw_badge,
    draw_badge_batch,
    draw_object,
    draw_scene,
)
from bmfa.data.drawn.badges import (
    _CLASSES,
    GRAIN,
    SHAPES,
    TEXTURES,
    TICK_COUNTS,
    _Badge,
    draw_badge_parts,
)
from bmfa.data.drawn.objects import OBJECT_CATEGORIES, draw_kite_flyer
from bmfa.data.drawn.painting import UniformGenerator
from bmfa.data.drawn.scenes import OBJECT_KINDS


def checksum(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def badges(seed: int, indices: Iterable[int], size: int, grain: float = GRAIN) -> str:
    images = (draw_badge_parts(seed, index, size, grain) for index in indices)
    return checksum(array for pixels, _, *masks in images for array in (pixels, *masks))


def drawn(instances: Iterable[Instance]) -> str:
    return checksum(array for one in instances for array in (one.image.pixels, one.mask))


def test_every_pixel_and_mask_is_that_of_the_records() -> None:
    found = {
        "badges": badges(0, range(72), 128),
        "larger badges": badges(7, range(12), 224),
        "large badges": badges(3, range(12345, 12347), 512),
        "badge without grain": checksum([draw_badge(0, 5, 64, grain=0.0).pixels]),
        "scenes": drawn(EmbeddedScenes(40).instances()),
        "other scenes": drawn(EmbeddedScenes(20, 5).instances()),
        "objects": drawn(EmbeddedObjects(8).instances()),
        "other objects": drawn(EmbeddedObjects(4, 1).instances()),
        "kites and flyers": drawn(one for index in range(6) for one in draw_kite_flyer(0, index)),
    }
    assert found == {
        "badges": "fd6ebad1f96e5433",
        "larger badges": "f3461e6e437f51fd",
        "large badges": "02857f5796c9c861",
        "badge without grain": "5cdf60406775d18d",
        "scenes": "1c207af146a271f0",
        "other scenes": "64702db24a10d347",
        "objects": "549c04bc64d62ad2",
        "other objects": "67893a6720d4ef8f",
        "kites and flyers": "bf25f9f1faa35c25",
    }


def test_badges_are_small_everywhere_and_balanced() -> None:
    images = [draw_badge(1, index) for index in range(240)]
    labels = np.array([image.label for image in images])
    assert np.bincount(labels).tolist() == [10] * len(BADGE_CLASSES)
    assert len(set(BADGE_CLASSES)) == len(SHAPES) * len(TEXTURES) * len(TICK_COUNTS)
    shares = np.array([image.mask.mean() for image in images])
    assert 0.004 <= shares.min() and shares.max() <= 0.085
    covered = np.sum([image.mask for image in images], axis=0)
    regions = covered.reshape(4, 32, 4, 32).sum((1, 3))
    # The whole badge is inside the image, so few of them reach the corners.
    assert regions.min() > 0.02 * regions.max()


def test_four_times_the_side_has_the_same_content() -> None:
    for index in (0, 5, 11, 17, 23):
        small, large = draw_badge(5, index), draw_badge(5, index, 512)
        assert large.label == small.label
        averaged = large.pixels.reshape(128, 4, 128, 4, 3).mean((1, 3))
        # Antialiased pixels of contours differ, the others by the rounding of the grain.
        assert np.abs(averaged - small.pixels).mean() < 2.0
        shares = large.mask.reshape(128, 4, 128, 4).mean((1, 3))
        assert np.abs(shares - small.mask)[np.abs(shares - 0.5) > 0.45].max() < 0.5
        assert abs(shares.mean() / small.mask.mean() - 1) < 0.05


def test_no_tick_is_under_the_bar() -> None:
    covered = 0
    for index in range(240):
        rng = UniformGenerator(0, index)
        badge = _Badge(rng, *_CLASSES[index % len(_CLASSES)], rng.number(14.0, 22.0))
        bar = badge.bar(rng)
        turns = badge.choose_slots(rng, bar)
        assert len(set(turns)) == badge.ticks == TICK_COUNTS[index % len(TICK_COUNTS)]
        covered += not all(badge._is_free(turn, bar) for turn in turns)
    assert covered <= 2  # a long bar along the rim may leave fewer free places than ticks


def test_images_of_the_task_have_masks_and_any_size() -> None:
    image = EmbeddedImages(30, seed=4, size=64)[25]
    assert image.name == "embedded:25, seed 4"
    assert EmbeddedImages(4).names()[3][0] == "embedded:3"  # as `bmfa screen` takes it
    assert image.pixels.shape == (64, 64, 3)
    assert image.mask is not None and image.mask.shape == (64, 64)
    assert (image.label, image.label_name) == (1, BADGE_CLASSES[1])
    pixels, labels, masks = draw_badge_batch(4, [3, 25], 64)
    assert pixels.shape == (2, 64, 64, 3) and labels.tolist() == [3, 1]
    np.testing.assert_array_equal(pixels[1], image.pixels)
    np.testing.assert_array_equal(masks[1], image.mask)
    for call, message in (
        (lambda: EmbeddedImages(1, size=16), "size is 16; pass an integer at least 32"),
        (lambda: draw_badge(-1, 0), "at least 0"),
        (lambda: draw_badge(0, -1), "at least 0"),
        (lambda: draw_object("fork", 0, 0), "category is 'fork'; pass one of kite, person"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_scene_masks_are_disjoint_and_of_every_kind_and_size() -> None:
    scenes = [draw_scene(6, index) for index in range(40)]
    for instances in scenes:
        assert np.sum([one.mask for one in instances], axis=0).max() == 1
        assert all(one.area == one.mask.sum() >= 20 for one in instances)
    every = [one for instances in scenes for one in instances]
    assert {one.category for one in every} == set(OBJECT_KINDS)
    assert {one.size for one in every} == {"small", "medium", "large"}
    assert len({one.annotation_id for one in every}) == len(every) >= 4 * len(scenes)


def test_a_source_has_its_images_in_order() -> None:
    scenes = [one.annotation_id for one in EmbeddedScenes(4, 3, start=5).instances()]
    assert scenes == [one.annotation_id for index in range(5, 9) for one in draw_scene(3, index)]
    objects = EmbeddedObjects(poses=3, seed=2)
    assert [one.category for one in objects.instances()] == 3 * list(OBJECT_CATEGORIES)
    kite, person = draw_kite_flyer(0, 1)
    assert kite.image is person.image and not (kite.mask & person.mask).any()


def test_objects_are_inside_their_images_and_contrast_with_them() -> None:
    for instance in EmbeddedObjects(poses=6, seed=1).instances():
        mask, luma = instance.mask, instance.image.pixels.astype(float).mean(-1)
        assert not (mask[0].any() or mask[-1].any() or mask[:, 0].any() or mask[:, -1].any())
        assert 0.01 < mask.mean() < 0.2
        ring = np.zeros_like(mask)
        ring[2:, 2:] |= mask[:-2, :-2]
        ring[:-2, :-2] |= mask[2:, 2:]
        assert abs(luma[mask].mean() - luma[ring & ~mask].mean()) > 20
