"""Write the embedded scenes as a COCO instances file with its pictures."""

import io
import json
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from bmfa.data.drawn.scenes import OBJECT_KINDS, EmbeddedScenes
from bmfa.data.instances import Instance, Picture
from bmfa.files import write_atomic
from bmfa.packages import load_package

ANNOTATIONS_NAME, PICTURES_NAME = "instances.json", "images"  # of the file and the folder


def write_coco(folder: str | os.PathLike[str], *, pictures: int = 120, seed: int = 0) -> Path:
    """Write `instances.json` and `images/*.png` to a folder.

    Files are written atomically and the annotations last, so if they exist, all pictures do.

    Args:
        folder: folder to write to; it is created.
        pictures: number of scenes.
        seed: seed of the scenes.

    Returns:
        The path of `instances.json`.

    Raises:
        OSError: a file cannot be written.

    Example:
        >>> import tempfile
        >>> from bmfa.data import write_coco
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_coco(folder, pictures=1).name
        'instances.json'
    """
    target = Path(folder)
    (target / PICTURES_NAME).mkdir(parents=True, exist_ok=True)
    scenes = EmbeddedScenes(pictures, seed)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for picture, instances in _group_by_picture(scenes):
        write_atomic(target / PICTURES_NAME / picture.name, _encode_png(picture))
        height, width = picture.pixels.shape[:2]
        images.append(
            {"id": picture.id, "file_name": picture.name, "width": width, "height": height}
        )
        annotations += [_annotation(instance) for instance in instances]
    content = {"images": images, "annotations": annotations, "categories": _categories()}
    write_atomic(target / ANNOTATIONS_NAME, json.dumps(content).encode())
    return target / ANNOTATIONS_NAME


def _group_by_picture(scenes: EmbeddedScenes) -> Iterator[tuple[Picture, list[Instance]]]:
    for _, group in groupby(scenes.instances(), key=lambda instance: instance.picture.id):
        instances = list(group)
        yield instances[0].picture, instances


def _encode_png(picture: Picture) -> bytes:
    buffer = io.BytesIO()
    load_package("PIL.Image").fromarray(picture.pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def _annotation(instance: Instance) -> dict[str, Any]:
    coco = load_package("pycocotools.mask")
    rle = coco.encode(instance.mask.astype("uint8", order="F"))
    return {
        "id": instance.annotation_id,
        "image_id": instance.picture.id,
        "category_id": tuple(OBJECT_KINDS).index(instance.category) + 1,
        "segmentation": {"size": list(instance.mask.shape), "counts": rle["counts"].decode()},
        "area": instance.area,
        "bbox": coco.toBbox(rle).tolist(),
        "iscrowd": 0,
    }


def _categories() -> list[dict[str, Any]]:
    return [
        {"id": number, "name": kind, "supercategory": "embedded"}
        for number, kind in enumerate(OBJECT_KINDS, start=1)
    ]
