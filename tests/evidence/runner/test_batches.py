"""Batches of images: worker processes change nothing but the speed, and errors stay one line."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from bmfa.data.classification import EmbeddedImages, LabelledImage, LabelledImages
from bmfa.data.images import ImageError, ImagesLostError
from bmfa.evidence.classification import run as evaluation
from bmfa.evidence.runner import batches as reading
from bmfa.evidence.runner.batches import ImageBatches
from bmfa.models import LoadedModel, load_model
from bmfa.records import Record


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("embedded")


def write_images(folder: Path, count: int) -> Path:
    folder.mkdir()
    for index, image in enumerate(EmbeddedImages(count)):
        Image.fromarray(image.pixels).save(folder / f"{index:03}.png")
    return folder


def test_batches_come_in_order_and_unreadable_images_are_skipped_or_raise(
    model: LoadedModel, tmp_path: Path
) -> None:
    folder = write_images(tmp_path / "val", 11)
    expected = model.preprocess.batch([p.pixels for p in EmbeddedImages(11)])
    whole = (folder / "001.png").read_bytes()
    for workers in (0, 3):
        batches = ImageBatches(LabelledImages(folder), model.preprocess, 2, workers=workers)
        assert batches.sizes == [2, 2, 2, 2, 2, 1]
        found = list(batches.read(range(6)))
        assert [batch.indices for batch in found] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
        assert torch.equal(torch.cat([batch.pixels for batch in found]), expected)
        (folder / "001.png").write_bytes(b"no image")
        first, second = batches.read([0, 1])
        assert first.indices == [0] and len(first.errors) == 1 and "001.png" in str(first.errors[0])
        assert second.indices == [2, 3] and second.errors == []
        strict = LabelledImages(folder, strict=True)
        with pytest.raises(ImageError, match=r"^001\.png [^\n]*$"):
            list(ImageBatches(strict, model.preprocess, 2, workers=workers).read([0, 1]))
        (folder / "001.png").write_bytes(whole)


def test_rows_do_not_depend_on_the_workers_and_images_that_vanish_under_them_stop_the_run(
    model: LoadedModel, tmp_path: Path
) -> None:
    folder = write_images(tmp_path / "val", 30)

    def evaluate(workers: int, limit: int, **options: Any) -> Record:
        images = LabelledImages(folder, limit=limit)
        given: dict[str, Any] = {"repeats": 0, "workers": workers, **options}
        return evaluation.run(model, images, ["random-quadrants:0.5"], **given)

    records = [evaluate(workers, 5, batch_size=2) for workers in (0, 2)]
    assert records[0].rows == records[1].rows
    assert [record.settings["workers"] for record in records] == [0, 2]

    def vanish(done: int, total: int) -> None:
        if done == 1:
            folder.rename(tmp_path / "elsewhere")

    with pytest.raises(ImagesLostError, match=r"^[^\n]*bring the images back[^\n]*$"):
        evaluate(2, 30, batch_size=1, progress=vanish)


def test_workers_are_for_files_on_several_cores_and_images_in_memory_are_read_by_index(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LabelledImages(write_images(tmp_path / "val", 1))
    for cores, expected in ((64, 16), (4, 4), (1, 0)):
        monkeypatch.setattr(reading, "cores_per_process", partial(int, cores))
        assert ImageBatches(files, model.preprocess, 1).workers == expected
        assert ImageBatches(EmbeddedImages(3), model.preprocess, 1).workers == 0
    images = [LabelledImage(p.name, p.pixels, p.label) for p in EmbeddedImages(3)]
    (batch,) = ImageBatches(iter(images), model.preprocess, 4).read([0])
    assert batch.indices == [0, 1, 2] and batch.labels == [p.label for p in images]
