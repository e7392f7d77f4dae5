"""Embedded pictures: equal bits everywhere, balanced, within their stated sizes, read back exactly."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from bmfa.data import (
    GLYPH_CLASSES,
    EmbeddedObjects,
    EmbeddedScenes,
    InstanceFiles,
    draw_glyph,
    draw_glyph_batch,
    draw_object,
    draw_scene,
    write_coco,
)
from bmfa.data.drawn.glyphs import GLYPHS
from bmfa.data.drawn.objects import OBJECT_CATEGORIES, draw_kite_flyer
from bmfa.data.drawn.scenes import OBJECT_KINDS


def checksum(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


@pytest.mark.parametrize(
    ("seed", "index", "expected"),
    [(0, 0, "cba333728d950f64"), (0, 7, "5da423c185f92cb3"), (3, 12345, "62724c33729b77cc")],
)
def test_a_glyph_picture_depends_on_seed_and_index_alone(
    seed: int, index: int, expected: str
) -> None:
    picture = draw_glyph(seed, index)
    assert checksum(picture.pixels, picture.mask) == expected


@pytest.mark.parametrize(
    ("seed", "index", "expected"), [(0, 0, "2d6a9a91fd4fb203"), (5, 99, "fe7fc971c45ce9e5")]
)
def test_a_scene_depends_on_seed_and_index_alone(seed: int, index: int, expected: str) -> None:
    instances = draw_scene(seed, index)
    masks = [one.mask for one in instances]
    assert checksum(instances[0].picture.pixels, *masks) == expected


def test_glyphs_are_small_everywhere_and_balanced() -> None:
    pictures = [draw_glyph(1, index) for index in range(400)]
    labels = np.array([picture.label for picture in pictures])
    assert np.bincount(labels).tolist() == [40] * len(GLYPH_CLASSES)
    shares = np.array([picture.mask.mean() for picture in pictures])
    assert 0.005 <= shares.min()
    assert shares.max() <= 0.03
    covered = np.sum([picture.mask for picture in pictures], axis=0)
    regions = covered.reshape(4, 28, 4, 28).sum((1, 3))
    assert regions.min() > 0.1 * regions.max()


def test_glyphs_contrast_with_their_surroundings() -> None:
    for index in range(100):
        picture = draw_glyph(2, index)
        luma = picture.pixels @ [0.299, 0.587, 0.114]
        near = np.pad(picture.mask, 6)
        around = (
            np.lib.stride_tricks.sliding_window_view(near, (13, 13)).any((2, 3)) & ~picture.mask
        )
        assert abs(luma[picture.mask].mean() - luma[around].mean()) > 25


def test_glyphs_fit_the_unit_circle_and_none_is_another_rotated() -> None:
    assert len(GLYPHS) == 10
    profiles = []
    for segments in GLYPHS.values():
        steps = np.linspace(0, 1, 200)[:, None, None]
        points = segments[:, 0] + steps * (segments[:, 1] - segments[:, 0])
        lengths = np.hypot(*(segments[:, 1] - segments[:, 0]).T)
        radius = np.hypot(*np.moveaxis(points, -1, 0))
        assert radius.max() <= 1.0 + 1e-9
        # Ink by distance from the centre, which no rotation changes.
        weights = np.broadcast_to(lengths, radius.shape)
        profile, _ = np.histogram(radius, bins=5, range=(0, 1.01), weights=weights)
        profiles.append(profile / profile.sum() * 10)
    distances = [np.abs(a - b).sum() for i, a in enumerate(profiles) for b in profiles[:i]]
    assert min(distances) > 0.5


def test_a_batch_holds_the_pictures() -> None:
    pixels, labels = draw_glyph_batch(4, [3, 14, 25])
    assert pixels.shape == (3, 112, 112, 3)
    assert pixels.dtype == np.uint8
    assert labels.tolist() == [3, 4, 5]
    np.testing.assert_array_equal(pixels[1], draw_glyph(4, 14).pixels)


@pytest.mark.parametrize(("seed", "index"), [(-1, 0), (0, -1)])
def test_negative_keys_are_explained(seed: int, index: int) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        draw_glyph(seed, index)


def test_scene_masks_are_disjoint_and_of_every_kind_and_size() -> None:
    scenes = [draw_scene(6, index) for index in range(40)]
    for instances in scenes:
        assert np.sum([one.mask for one in instances], axis=0).max() == 1
        assert all(one.area == one.mask.sum() >= 20 for one in instances)
    every = [one for instances in scenes for one in instances]
    assert {one.category for one in every} == set(OBJECT_KINDS)
    assert {one.size for one in every} == {"small", "medium", "large"}
    assert len({one.annotation_id for one in every}) == len(every) >= 4 * len(scenes)


def test_parts_of_a_source_are_its_pictures_in_order() -> None:
    source = EmbeddedScenes(pictures=11, seed=3, start=5)
    parts = list(source.parts(32))
    assert [len(part) for part in parts] == [4, 4, 3]
    whole = [one.annotation_id for one in source.instances()]
    assert [one.annotation_id for part in parts for one in part.instances()] == whole


def test_written_scenes_are_read_back_exactly(tmp_path: Path) -> None:
    file = write_coco(tmp_path / "deep" / "er", pictures=3, seed=8)
    read = list(InstanceFiles(file, file.parent / "images").instances())
    made = list(EmbeddedScenes(pictures=3, seed=8).instances())
    assert len(read) == len(made)
    for one, other in zip(read, made, strict=True):
        np.testing.assert_array_equal(one.mask, other.mask)
        np.testing.assert_array_equal(one.picture.pixels, other.picture.pixels)
        assert (one.category, one.area, one.annotation_id) == (
            other.category,
            other.area,
            other.annotation_id,
        )
    assert sorted(path.name for path in file.parent.iterdir()) == ["images", "instances.json"]
    assert set(json.loads(file.read_text())) == {"images", "annotations", "categories"}


def test_an_interrupted_write_leaves_no_torn_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_coco(tmp_path, pictures=1)
    before = (tmp_path / "instances.json").read_bytes()

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_coco(tmp_path, pictures=2)
    assert (tmp_path / "instances.json").read_bytes() == before
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["000000000000.png"]


@pytest.mark.parametrize(
    ("category", "index", "expected"),
    [
        ("kite", 0, "de252de410d68826"),
        ("person", 3, "bc7aef46e8cd68f2"),
        ("book", 7, "268064cd9ef52c7f"),
        ("spoon", 31, "0033c7ef85fb81cd"),
    ],
)
def test_an_object_depends_on_category_seed_and_index_alone(
    category: str, index: int, expected: str
) -> None:
    instance = draw_object(category, 0, index)
    assert checksum(instance.picture.pixels, instance.mask) == expected


def test_objects_are_inside_their_pictures_and_contrast_with_them() -> None:
    for instance in EmbeddedObjects(poses=6, seed=1).instances():
        mask, luma = instance.mask, instance.picture.pixels.astype(float).mean(-1)
        assert not (mask[0].any() or mask[-1].any() or mask[:, 0].any() or mask[:, -1].any())
        assert 0.01 < mask.mean() < 0.2
        ring = np.zeros_like(mask)
        ring[2:, 2:] |= mask[:-2, :-2]
        ring[:-2, :-2] |= mask[2:, 2:]
        assert abs(luma[mask].mean() - luma[ring & ~mask].mean()) > 20


def test_objects_come_in_parts_of_the_same_instances() -> None:
    source = EmbeddedObjects(poses=3, seed=2)
    whole = list(source.instances())
    assert len(whole) == len(source) == 12
    assert [one.category for one in whole] == 3 * list(OBJECT_CATEGORIES)
    parts = [one for part in source.parts(5) for one in part.instances()]
    assert [one.annotation_id for one in parts] == [one.annotation_id for one in whole]
    assert len({one.picture.id for one in whole}) == 12


def test_a_kite_flyer_has_two_objects_that_do_not_touch() -> None:
    kite, person = draw_kite_flyer(0, 1)
    assert kite.picture is person.picture
    assert not (kite.mask & person.mask).any()


def test_an_unknown_object_is_refused() -> None:
    with pytest.raises(ValueError, match="category is 'fork'; pass one of kite, person"):
        draw_object("fork", 0, 0)
