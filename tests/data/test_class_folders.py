"""Labels from folders by class, as torchvision's ImageFolder has them, and from class maps."""

from pathlib import Path

import pytest
from PIL import Image

from bmfa.data import ImageError, LabelledImages


def tree(root: Path, *names: str) -> Path:
    """A folder with an image at each of these paths."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    return root


def labels(root: Path, **options: object) -> list[int | None]:
    return [label for _, label in LabelledImages(root, **options).names()]  # type: ignore[arg-type]


def test_the_names_of_folders_are_classes(tmp_path: Path) -> None:
    found = LabelledImages(tree(tmp_path / "a", "zebra/a.png", "cat/b.png", "Dog/c.png"), classes=3)
    # As in ImageFolder: capitals come first.
    assert found.names() == [("Dog/c.png", 0), ("cat/b.png", 1), ("zebra/a.png", 2)]
    assert found.label_source == "folders in sorted order: Dog 0, cat 1, zebra 2"
    assert found.label_warning is None
    root = tree(tmp_path / "b", "2/a.png", "10/b.png")  # integers keep their meaning
    assert labels(root, classes=11) == [10, 2]
    with pytest.raises(ImageError, match=r"10/b\.png has class 10, and the model 10 classes"):
        LabelledImages(root, classes=10)
    root = tree(tmp_path / "c", "ring/a.png", "arrow/b.png")
    assert labels(root, classes=["ring", "cross", "arrow"]) == [2, 0]
    assert labels(root, classes=["ring", "cross", "bow"]) == [0, 1]  # arrow is none of them
    # A model that was trained on these folders alone.
    assert labels(tree(tmp_path / "d", "n01440764/a.png", "n99999999/b.png"), classes=2) == [0, 1]
    root = tree(tmp_path / "e", "a/1.png", "b/1.png", "c/1.png")
    warning = LabelledImages(root, classes=10).label_warning
    assert warning is not None and "classes 0 to 2 of the model's 10" in warning
    with pytest.raises(ImageError, match=r"c/1\.png has class 2, .* 2 classes.*--class-map"):
        LabelledImages(root, classes=2)


def test_names_with_two_meanings_are_refused(tmp_path: Path) -> None:
    cases = [
        ("7/a.png", "cat/b.png"),
        ("n01440764/a.png", "7/b.png"),
        ("cat/b.png", "n01440764/a.png"),
        ("7/a.png", "b.png"),
        ("c.png", "cat/a.png", "dog/b.png"),
        ("train/cat/a.png", "val/dog/c.png", "val/cat/b.png"),
        ("cat/a.png", "dog/puppy/b.png"),
    ]
    for number, names in enumerate(cases):
        first, second = sorted(names)[:2]
        with pytest.raises(ImageError, match=f"has {first} and {second}, .*--class-map") as caught:
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
    # A map decides over integers, and names may end with one.
    for number, (root, text, expected) in enumerate(
        (
            (
                tree(tmp_path / "x", "boeing 737/a.png", "boeing 747/b.png"),
                "boeing 747\nboeing 737",
                [1, 0],
            ),
            (tree(tmp_path / "y", "1/a.png", "2/b.png"), "1 0\n2 1\n", [0, 1]),
        )
    ):
        (tmp_path / f"{number}.txt").write_text(text)
        assert labels(root, class_map=tmp_path / f"{number}.txt") == expected


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
    with pytest.raises(ImageError, match="pass one of them"):
        LabelledImages(root, tmp_path / "x", class_map=file)
