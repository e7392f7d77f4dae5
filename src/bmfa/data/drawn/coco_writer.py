"""Write the embedded scenes as a COCO instances file with its images."""

import io
import json
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from bmfa.data.drawn.scenes import OBJECT_KINDS, EmbeddedScenes
from bmfa.data.instances import Instance, InstanceImage
from bmfa.files import write_atomic
from bmfa.packages import load_package

ANNOTATIONS_NAME, IMAGES_NAME = "instances.json", "images"  # of the file and the folder


def write_coco(folder: str | os.PathLike[str], *, images: int = 120, seed: int = 0) -> Path:
    """Write `instances.json` and `images/*.png` to a folder.

    Files are written atomically and the annotations last, so if they exist, all images do.

    Args:
        folder: folder to write to; it is created.
        images: number of scenes.
        seed: seed of the scenes.

    Returns:
        The path of `instances.json`.

    Raises:
        OSError: a file cannot be written.

    Example:
        >>> import tempfile
        >>> from bmfa.data import write_coco
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_coco(folder, images=1).name
        'instances.json'
    """
    target = Path(folder)
    (target / IMAGES_NAME).mkdir(parents=True, exist_ok=True)
    scenes = EmbeddedScenes(images, seed)
    listed: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image, instances in _group_by_image(scenes):
        write_atomic(target / IMAGES_NAME / image.name, _encode_png(image))
        height, width = image.pixels.shape[:2]
        listed.append({"id": image.id, "file_name": image.name, "width": width, "height": height})
        annotations += [_annotation(instance) for instance in instances]
    content = {"images": listed, "annotations": annotations, "categories": _categories()}
    write_atomic(target / ANNOTATIONS_NAME, json.dumps(content).encode())
    return target / ANNOTATIONS_NAME


def _group_by_image(scenes: EmbeddedScenes) -> Iterator[tuple[InstanceImage, list[Instance]]]:
    for _, group in groupby(scenes.instances(), key=lambda instance: instance.image.id):
        instances = list(group)
        yield instances[0].image, instances


def _encode_png(image: InstanceImage) -> bytes:
    buffer = io.BytesIO()
    load_package("PIL.Image").fromarray(image.pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def _annotation(instance: Instance) -> dict[str, Any]:
    coco = load_package("pycocotools.mask")
    rle = coco.encode(instance.mask.astype("uint8", order="F"))
    return {
        "id": instance.annotation_id,
        "image_id": instance.image.id,
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
