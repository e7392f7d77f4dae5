"""COCO and LVIS files: every published form, faults counted and named, damage located."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pycocotools import mask as coco_mask

from bmfa.data import AnnotationError, ImageError, InstanceFiles, Tally
from bmfa.data.coco import MaskError, decode_mask, read_annotations
from bmfa.data.instances import size_group

HEIGHT, WIDTH = 30, 40
SQUARE = [[5.0, 5, 15, 5, 15, 15, 5, 15]]


def image(number: int = 1, name: Any = "000000000001.png", width: int = WIDTH) -> dict[str, Any]:
    return {"id": number, "file_name": name, "width": width, "height": HEIGHT}


def annotation(number: int, segmentation: Any = None, **changes: Any) -> dict[str, Any]:
    record = {"id": number, "image_id": 1, "category_id": 1, "area": 100.0, "iscrowd": 0}
    return record | {"segmentation": SQUARE if segmentation is None else segmentation} | changes


def content(*annotations: Any, **changes: Any) -> dict[str, Any]:
    categories = [{"id": 1, "name": "cat", "supercategory": "animal"}]
    whole = {"images": [image()], "annotations": list(annotations), "categories": categories}
    return whole | changes


def written(folder: Path, whole: Any, *names: str) -> InstanceFiles:
    (folder / "images" / "val2017").mkdir(parents=True, exist_ok=True)
    for name in names or ("000000000001.png",):
        Image.new("RGB", (WIDTH, HEIGHT), (10, 200, 30)).save(folder / "images" / name)
    (folder / "instances.json").write_text(json.dumps(whole))
    return InstanceFiles(folder / "instances.json", folder / "images")


def runs_of(mask: np.ndarray) -> list[int]:
    flat = mask.flatten(order="F")
    borders = np.flatnonzero(np.diff(flat)) + 1
    lengths = np.diff([0, *borders.tolist(), flat.size]).tolist()
    return [0, *lengths] if flat[0] else lengths


def packed(mask: np.ndarray) -> str:
    counts: bytes = coco_mask.encode(np.asfortranarray(mask.view(np.uint8)))["counts"]
    return counts.decode()


def test_polygons_and_both_run_lengths_give_one_mask(tmp_path: Path) -> None:
    mask = np.zeros((HEIGHT, WIDTH), dtype=bool)
    mask[5:15, 5:15] = True
    runs = [{"size": [HEIGHT, WIDTH], "counts": counts} for counts in (runs_of(mask), packed(mask))]
    whole = content(annotation(1), annotation(2, runs[0], iscrowd=1), annotation(3, runs[1]))
    instances = list(written(tmp_path, whole).instances())
    assert [(one.annotation_id, one.crowd) for one in instances] == [(1, 0), (2, 1), (3, 0)]
    for one in instances:
        np.testing.assert_array_equal(one.mask, mask)
        assert (one.category, one.frequency, one.size) == ("cat", None, "small")
        assert one.image is instances[0].image


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_run_lengths_are_decoded_as_pycocotools_does(height: int, width: int, seed: int) -> None:
    mask = np.random.default_rng(seed).random((height, width)) < 0.4
    mask[seed % height, seed % width] = True
    for counts in (packed(mask), runs_of(mask)):
        decoded = decode_mask({"size": [height, width], "counts": counts}, height, width)
        np.testing.assert_array_equal(decoded, mask)


POLYGON_FAULTS: dict[str, list[Any]] = {
    "degenerate polygon": [[[1, 1, 5, 5]], [], [[3, 3, 3, 3, 3, 3]]],
    "malformed polygon": [
        [[1, 1, 5, 5, 9]],
        [[1, 1, 5, 5, 9, "9"]],
        [[1, 1, 5, 5, 9, float("nan")]],
        [1, 1, 5, 5, 9, 1],
    ],
    "mask outside the image": [
        [[50, 50, 60, 50, 60, 60]],
        [[-30, 2, -10, 2, -10, 9]],
        [[0, 0, 1e9, 0, 0, 1e9]],
        [[0, 0, 10**400, 0, 0, 1]],
    ],
}
PIXELS = HEIGHT * WIDTH
RUNS_FAULTS: dict[str, list[Any]] = {
    "empty mask": [[PIXELS]],
    "malformed run lengths": [
        *([5, 7], [5, 7000], [-5, PIXELS + 5], [0.5, 1.5]),
        *("zz", "o" * 400, "\u00e9", None),
    ],
}


def test_an_unusable_mask_has_a_reason() -> None:
    faults = [(reason, one) for reason, bad in POLYGON_FAULTS.items() for one in bad]
    for reason, bad in RUNS_FAULTS.items():
        faults += [(reason, {"size": [HEIGHT, WIDTH], "counts": counts}) for counts in bad]
    faults.append(("mask outside the image", {"size": [9, 9], "counts": [81]}))
    for reason, segmentation in faults:
        with pytest.raises(MaskError, match=f"^{reason}$"):
            decode_mask(segmentation, HEIGHT, WIDTH)


def test_faults_are_counted_named_and_skipped(tmp_path: Path) -> None:
    images = [image(), image(2, "gone.png"), image(3, "other.png", WIDTH + 1)]
    whole = content(
        annotation(1),
        annotation(2, [[1, 1, 5, 5]]),
        annotation(3, [[50, 50, 60, 50, 60, 60]]),
        annotation(4, category_id=9),
        *(annotation(5 + n, image_id=one) for n, one in enumerate((2, 2, 77, 3, 4))),
        images=[*images, image(4, "broken.png")],
    )
    source = written(tmp_path, whole, "000000000001.png", "other.png", "broken.png")
    (tmp_path / "images" / "broken.png").write_bytes(b"broken")
    tally = Tally()
    assert [one.annotation_id for one in source.instances(tally)] == [1]
    assert tally.faults == {
        "degenerate polygon": 1,
        "mask outside the image": 1,
        "unknown category": 1,
        "missing image": 3,
        "image of another size than annotated": 1,
        "unreadable image": 1,
    }
    lines = tally.lines()
    assert "degenerate polygon: 1 (annotation 2 of 000000000001.png)" in lines
    assert "missing image: 3 (gone.png, image 77, not among images, ...)" in lines


def test_strict_stops_at_the_first_fault(tmp_path: Path) -> None:
    for changes, said in (
        ({"segmentation": [[1, 1, 5, 5]]}, "annotation 1 of .*: degenerate polygon; .*strict"),
        ({"category_id": 9}, "unknown category"),
        ({"image_id": 77}, "image 77, not among images: missing image"),
    ):
        source = written(tmp_path, content(annotation(1, **changes)))
        with pytest.raises(AnnotationError, match=said):
            list(source.instances(Tally(strict=True)))


def test_area_comes_from_the_mask_where_the_file_has_none(tmp_path: Path) -> None:
    parts = [*SQUARE, [20, 20, 30, 20, 30, 25, 20, 25], [1, 1, 2, 2]]  # joined, slivers ignored
    (one,) = written(tmp_path, content(annotation(1, parts, area=None))).instances()
    assert one.area == one.mask.sum() == 100 + 50
    sizes = [size_group(area) for area in (1023.9, 1024, 9215.9, 9216)]
    assert sizes == ["small", "medium", "medium", "large"]


def test_lvis_images_are_found_by_id_and_by_url(tmp_path: Path) -> None:
    by_name = {"file_name": "COCO_val2014_000000000001.jpg"}
    by_url = {"coco_url": "http://images.example/val2017/000000000001.jpg"}
    category = {"id": 1, "name": "acorn", "frequency": "r", "synset": "acorn.n.01"}
    record = annotation(1)
    del record["iscrowd"], record["area"]
    for number, (named, name) in enumerate(
        [
            (by_name, "000000000001.jpg"),
            (by_name, "COCO_val2014_000000000001.jpg"),
            (by_url, "000000000001.jpg"),
            (by_url, "val2017/000000000001.jpg"),
        ]
    ):
        listed = {"id": 1, "width": WIDTH, "height": HEIGHT, "neg_category_ids": []} | named
        whole = content(record, images=[listed], categories=[category])
        (one,) = written(tmp_path / str(number), whole, name).instances()
        assert (one.category, one.frequency, one.crowd) == ("acorn", "r", False)
        assert one.image.name == name


def test_a_folder_without_the_images_says_what_was_sought_and_found(tmp_path: Path) -> None:
    with pytest.raises(ImageError) as caught:
        written(tmp_path, content(annotation(1)), "x.png", "y.png")
    for part in ("none of the 1 images", "for 000000000001.png", "found 2 images, such as x.png"):
        assert part in str(caught.value)


WRONG: list[tuple[Any, str]] = [
    ([], "has no list categories"),
    ({"images": [], "categories": []}, "has no list annotations"),
    (content(images=3), "has no list images"),
    (content(5), r"annotations\[0\]\.id is null"),
    (content(annotation(1), annotation(2, image_id="x")), r'annotations\[1\]\.image_id is "x"'),
    (content(annotation(1, segmentation="x")), r"annotations\[0\]\.segmentation is"),
    (
        content({"id": 1, "image_id": 1, "category_id": 1, "caption": "a cat"}),
        r"annotations\[0\]\.segmentation is null.*of type list | dict in",
    ),
    (content(annotation(1, area="9")), r'annotations\[0\]\.area is "9"'),
    (content(annotation(1, iscrowd=[])), r"annotations\[0\]\.iscrowd is \[\]"),
    (content(images=[image(width=None)]), r"images\[0\]\.width is null"),
    (content(images=[image(name=3)]), r"images\[0\]\.file_name is 3"),
    (content(categories=[{"id": 1}]), r"categories\[0\]\.name is null"),
    (content(categories=[{"id": 1, "name": "a", "frequency": 3}]), r"categories\[0\]\.frequency"),
]


def test_a_file_of_another_structure_names_the_place(tmp_path: Path) -> None:
    for whole, said in WRONG:
        (tmp_path / "a.json").write_text(json.dumps(whole))
        with pytest.raises(AnnotationError, match=said) as caught:
            read_annotations(tmp_path / "a.json")
        assert "\n" not in str(caught.value)
        assert "a.json" in str(caught.value)


def test_damage_is_located(tmp_path: Path) -> None:
    with pytest.raises(AnnotationError, match="cannot be read: No such file"):
        read_annotations(tmp_path / "a.json")
    whole = json.dumps(content(annotation(1))).encode()
    damaged = [(whole[:keep], r"was cut off: .*line 1 column \d+") for keep in (0, 1, 30, 200, -1)]
    damaged += [
        (b'{"images": [,]}', "line 1 column 13"),
        (b"\xff\xd8\xff", "decode byte 0xff in position 0"),
        (b"[" * 200_000, "is not JSON"),
        (b'{"images": ' + b"9" * 5000 + b"}", "is not JSON"),
    ]
    for data, said in damaged:
        (tmp_path / "a.json").write_bytes(data)
        with pytest.raises(AnnotationError, match=said) as caught:
            read_annotations(tmp_path / "a.json")
        assert "\n" not in str(caught.value)
