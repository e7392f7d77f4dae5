"""Images from folders and zips, read in place; what is refused and how."""

import io
import json
import multiprocessing
import pickle
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bmfa.cli import main
from bmfa.data import ImageError, ImageFiles, InstanceFiles, LabelledImages, Tally, images
from bmfa.models import Preprocessing


def encoded(pixels: np.ndarray, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=form, **options)
    return buffer.getvalue()


def sample(height: int = 5, width: int = 7) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def folder_of(path: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def stores(tmp_path: Path, files: dict[str, bytes]) -> list[ImageFiles]:
    """The same files in a folder and in a zip."""
    folder = folder_of(tmp_path / f"images-{len(list(tmp_path.iterdir()))}", files)
    archive = shutil.make_archive(str(folder), "zip", folder)
    return [ImageFiles(folder), ImageFiles(archive)]


def gif(frames: int) -> bytes:
    buffer = io.BytesIO()
    first, *rest = [Image.fromarray(sample() // (n + 1)) for n in range(frames)]
    first.save(buffer, format="GIF", save_all=True, append_images=rest)
    return buffer.getvalue()


def test_reads_the_same_pixels_from_folder_and_zip(tmp_path: Path) -> None:
    files = {"val2017/a.png": encoded(sample()), "notes.txt": b"no image", ".a.png": b""}
    for source in stores(tmp_path, files | {"b.gif": gif(2)}):
        assert source.entries == ("b.gif", "val2017/a.png")  # a gif is not left out in silence
        for reader in (source, pickle.loads(pickle.dumps(source))):
            np.testing.assert_array_equal(reader.read("val2017/a.png"), sample())


def test_a_name_fits_by_path_by_its_end_or_by_its_base(tmp_path: Path) -> None:
    for source in stores(tmp_path, {"coco/val2017/1.jpg": b"", "coco/val2017/2.jpg": b""}):
        for names in (["1.jpg"], ["val2017/1.jpg"], ["elsewhere/1.jpg"], ["3.jpg", "1.jpg"]):
            assert source.find(names) == "coco/val2017/1.jpg"
        assert source.find(["3.jpg"]) is None
    source, _ = stores(tmp_path, {"train/1.jpg": b"", "val/1.jpg": b""})
    assert source.find(["1.jpg", "val/1.jpg"]) == "val/1.jpg"  # a longer name settles the doubt
    with pytest.raises(ImageError, match=r"1\.jpg matches 2 images .*train/1\.jpg, val/1\.jpg"):
        source.find(["1.jpg"])


def test_linked_folders_are_followed_once(tmp_path: Path) -> None:
    folder_of(tmp_path / "elsewhere", {"a.png": encoded(sample())})
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "set")
    assert ImageFiles(tmp_path / "set").entries == ("linked/a.png",)


def test_every_eight_bit_mode_becomes_rgb() -> None:
    grey = sample()[..., 0]
    read = images.decode_image(encoded(grey), "grey")
    np.testing.assert_array_equal(read, np.repeat(grey[..., None], 3, axis=2))
    palette = io.BytesIO()
    Image.fromarray(grey).convert("P").save(palette, format="PNG", transparency=b"\x00\xff")
    assert images.decode_image(palette.getvalue(), "palette").shape == (5, 7, 3)


def with_orientation(pixels: np.ndarray, orientation: int, form: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(pixels, form, exif=exif)


# What turns the stored image upright, by the definition of the EXIF standard.
UPRIGHT = {
    1: lambda x: x,
    2: np.fliplr,
    3: lambda x: np.rot90(x, 2),
    4: np.flipud,
    5: lambda x: x.transpose(1, 0, 2),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.rot90(x, 2).transpose(1, 0, 2),
    8: np.rot90,
}


def test_images_are_turned_upright_as_exif_says(tmp_path: Path) -> None:
    for files in stores(tmp_path, {f"{o}.png": with_orientation(sample(), o) for o in UPRIGHT}):
        for orientation, turn in UPRIGHT.items():
            np.testing.assert_array_equal(files.read(f"{orientation}.png"), turn(sample()))
            np.testing.assert_array_equal(files.read(f"{orientation}.png", upright=False), sample())
    damaged = encoded(sample(), "PNG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    for data in (damaged, *(with_orientation(sample(), o) for o in (0, 9, 77))):
        np.testing.assert_array_equal(images.decode_image(data, "a.png"), sample())
    preprocess = Preprocessing((7, 5), 1.0)  # turns a Pillow image, too
    image = Image.open(io.BytesIO(with_orientation(sample(), 6)))
    expected = preprocess(np.ascontiguousarray(UPRIGHT[6](sample())))
    np.testing.assert_array_equal(preprocess(image).numpy(), expected.numpy())


def test_annotations_decide_where_they_fit_one_orientation_alone(tmp_path: Path) -> None:
    folder_of(tmp_path / "images", {"1.png": with_orientation(sample(), 6)})
    for height, width, expected in ((5, 7, sample()), (7, 5, UPRIGHT[6](sample()))):
        segmentation = {"size": [height, width], "counts": [0, height * width]}
        annotation = {"id": 1, "image_id": 1, "category_id": 1, "segmentation": segmentation}
        content = {
            "images": [{"id": 1, "file_name": "1.png", "height": height, "width": width}],
            "annotations": [annotation],
            "categories": [{"id": 1, "name": "thing"}],
        }
        (tmp_path / "instances.json").write_text(json.dumps(content))
        source = InstanceFiles(tmp_path / "instances.json", tmp_path / "images")
        (instance,) = source.instances(Tally(strict=True))
        np.testing.assert_array_equal(instance.image.pixels, expected)


def test_files_that_are_not_images_are_named_with_a_way_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    heic = b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00"
    message = "cannot be decoded: it is of another format, or damaged; pass JPEG, PNG, WEBP or BMP"
    for data in (gif(1), gif(3), encoded(sample(), "TIFF"), heic, b"%PDF-1.7\n", b"name\n", b""):
        with pytest.raises(ImageError, match=f"^a.jpg {message}"):
            images.decode_image(data, "a.jpg")
    (tmp_path / "a.gif").write_bytes(gif(1))
    with pytest.raises(SystemExit) as stop:
        main(["screen", str(tmp_path / "a.gif"), "--output", str(tmp_path / "s.png")])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and f"a.gif {message}" in error


def test_what_cannot_be_read_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, deep = encoded(sample(30, 30), "JPEG")[:500], np.full((4, 4), 40_000, dtype=np.uint16)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    undecodable = r"cannot be decoded.*JPEG, PNG, WEBP or BMP"
    for name, data, message in (
        ("a.jpg", b"", undecodable),
        ("a.jpg", b"no image", undecodable),
        ("a.jpg", cut, undecodable),
        ("deep.png", encoded(deep), "16.*convert it to 8 bits"),
        ("bomb.png", encoded(np.zeros((40, 40), np.uint8)), "decompression bomb"),
        ("bomb.png", encoded(np.zeros((99, 99), np.uint8)), "decompression bomb"),
    ):
        for source in stores(tmp_path, {name: data}):
            with pytest.raises(ImageError, match=rf"{name} .*{message}") as caught:
                source.read(name)
            assert "\n" not in str(caught.value)
    (tmp_path / "a.zip").write_bytes(b"no zip")
    for call, message in (
        (lambda: ImageFiles(tmp_path / "nowhere"), "no folder or zip at"),
        (lambda: ImageFiles(tmp_path / "a.zip").entries, "neither a folder nor a readable zip"),
        (lambda: ImageFiles(tmp_path).read("b.png"), r"b\.png in .* cannot be read"),
    ):
        with pytest.raises(ImageError, match=message):
            call()
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    message = r"pillow is not installed; run: pip install pillow, .*pip install '\.\[images\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        images.decode_image(b"", "a.png")


def test_a_image_that_fits_is_prepared_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = sample(12, 16)
    for preprocess in (Preprocessing((12, 16), 1.0), Preprocessing((12, 16), squash=True)):
        expected = preprocess(Image.fromarray(pixels))
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "PIL.Image", None)
            assert preprocess(pixels).equal(expected)
            with pytest.raises(ModuleNotFoundError, match="pillow"):
                Preprocessing((12, 16), 0.9)(pixels)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_worker_processes_read_the_same_images(tmp_path: Path) -> None:
    files = {f"{n}/{n}.png": encoded(sample() + np.uint8(n)) for n in range(4)}
    folder, archive = (store.path for store in stores(tmp_path, files))
    for place, method in ((folder, "fork"), (archive, "fork"), (archive, "spawn")):
        source = LabelledImages(place)
        expected = list(source)  # opens the zip before the fork
        processes = 2 if method == "fork" else 1  # a spawned one imports torch
        with ProcessPoolExecutor(processes, multiprocessing.get_context(method)) as pool:
            read = list(pool.map(source.__getitem__, range(4)))
        assert [image.label for image in read] == [0, 1, 2, 3]
        for n, image in enumerate([*expected, *read]):
            np.testing.assert_array_equal(image.pixels, sample() + np.uint8(n % 4))
