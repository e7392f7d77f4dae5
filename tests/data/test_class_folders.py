"""Labels from folders by class, as torchvision's ImageFolder has them, and from class maps."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bmfa.data import ImageError, LabelledImages


def png() -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(data, "PNG")
    return data.getvalue()


PNG = png()


def tree(root: Path, *names: str) -> Path:
    """A folder with an image at each of these paths."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PNG)
    return root


def labels(root: Path, **options: object) -> list[int | None]:
    return [label for _, label in LabelledImages(root, **options).names()]  # type: ignore[arg-type]


def test_other_names_are_classes_in_sorted_order(tmp_path: Path) -> None:
    root = tree(tmp_path, "zebra/a.png", "cat/b.png", "Dog/c.png")
    found = LabelledImages(root, classes=3)
    # As in ImageFolder: capitals come first.
    assert found.names() == [("Dog/c.png", 0), ("cat/b.png", 1), ("zebra/a.png", 2)]
    assert found.label_source == "folders in sorted order: Dog 0, cat 1, zebra 2"
    assert found.label_warning is None


def test_integers_keep_their_meaning(tmp_path: Path) -> None:
    found = LabelledImages(tree(tmp_path, "2/a.png", "10/b.png"), classes=11)
    assert dict(found.names()) == {"10/b.png": 10, "2/a.png": 2}
    with pytest.raises(ImageError, match=r"10/b\.png has class 10, and the model 10 classes"):
        LabelledImages(tmp_path, classes=10)


def test_the_class_names_of_the_model_come_before_sorted_order(tmp_path: Path) -> None:
    root = tree(tmp_path, "ring/a.png", "arrow/b.png")
    found = LabelledImages(root, classes=["ring", "cross", "arrow"])
    assert dict(found.names()) == {"arrow/b.png": 2, "ring/a.png": 0}
    assert labels(root, classes=["ring", "cross", "bow"]) == [0, 1]  # arrow is none of them


def test_wordnet_ids_of_a_model_with_these_classes_alone_are_sorted(tmp_path: Path) -> None:
    root = tree(tmp_path, "n01440764/a.png", "n99999999/b.png")
    assert labels(root, classes=2) == [0, 1]


def test_fewer_folders_than_classes_are_said_and_more_are_refused(tmp_path: Path) -> None:
    root = tree(tmp_path, "a/1.png", "b/1.png", "c/1.png")
    warning = LabelledImages(root, classes=10).label_warning
    assert warning is not None and "classes 0 to 2 of the model's 10" in warning
    with pytest.raises(
        ImageError, match=r"c/1\.png has class 2, and the model 2 classes.*--class-map"
    ):
        LabelledImages(root, classes=2)


def test_names_with_two_meanings_are_refused(tmp_path: Path) -> None:
    cases = [
        (("7/a.png", "cat/b.png"), "folder '7', which is a class index .* the folder 'cat'"),
        (("n01440764/a.png", "cat/b.png"), "folder 'n01440764', which .* the folder 'cat'"),
        (("7/a.png", "b.png"), "folder '7', .* images of its own"),
        (("cat/a.png", "dog/b.png", "c.png"), "images beside its class folders"),
        (("train/cat/a.png", "val/cat/b.png", "val/dog/c.png"), "several folders, train and val"),
        (("cat/a.png", "dog/puppy/b.png"), r"several folders, \. and dog"),
    ]
    for number, (names, message) in enumerate(cases):
        with pytest.raises(ImageError, match=message) as caught:
            LabelledImages(tree(tmp_path / str(number), *names))
        assert "\n" not in str(caught.value)


def test_class_maps(tmp_path: Path) -> None:
    root = tree(tmp_path / "val", "cat/a.png", "great white shark/b.png", "dog/c.png")
    for file, text in (
        ("map.txt", "dog\ngreat white shark\ncat\n"),
        ("map.txt", "cat 2\ngreat white shark 1\ndog 0\n"),
        ("map.csv", "cat,2\n\ngreat white shark, 1\ndog , 0\nunused, 9"),
    ):
        (tmp_path / file).write_text(text)
        found = LabelledImages(root, class_map=tmp_path / file, classes=1000)
        assert [label for _, label in found.names()] == [2, 0, 1]
        assert found.label_source == f"class map {file}" and found.label_warning is None


def test_a_class_map_decides_over_integers_and_names_that_end_with_one(tmp_path: Path) -> None:
    root = tree(tmp_path / "val", "boeing 737/a.png", "boeing 747/b.png")
    (tmp_path / "map.txt").write_text("boeing 747\nboeing 737\n")
    assert labels(root, class_map=tmp_path / "map.txt") == [1, 0]
    root = tree(tmp_path / "other", "1/a.png", "2/b.png")
    (tmp_path / "map.txt").write_text("1 0\n2 1\n")
    assert labels(root, class_map=tmp_path / "map.txt") == [0, 1]


def test_unusable_class_maps_are_one_sentence(tmp_path: Path) -> None:
    root, file = tree(tmp_path / "val", "cat/a.png", "dog/c.png"), tmp_path / "map.txt"
    for data, message in (
        (b"cat\n", "no class for 'dog'"),
        (b"", "no class for 'cat'"),
        (b"cat\ndog\ncat\n", "names a folder twice"),
        (b"\xff\xd8", "cannot be read"),
        (b"cat 12\ndog 3\n", "has class 12, and the model 10 classes"),
    ):
        file.write_bytes(data)
        with pytest.raises(ImageError, match=message) as caught:
            LabelledImages(root, class_map=file, classes=10)
        assert "\n" not in str(caught.value)


def test_labels_and_class_map_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="pass one of them"):
        LabelledImages(tree(tmp_path, "a/1.png"), tmp_path / "x", class_map=tmp_path / "y")
