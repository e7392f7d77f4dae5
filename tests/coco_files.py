"""The embedded scenes as a COCO instances file with its images."""

import json
from itertools import groupby
from pathlib import Path

from PIL import Image
from pycocotools import mask as coco

from bmfa.data import EmbeddedScenes
from bmfa.data.drawn.scenes import OBJECT_KINDS


def write_coco(folder: Path, images: int, seed: int = 0) -> Path:
    """Write `images/*.png` and `instances.json`; return the path of the latter."""
    (folder / "images").mkdir(parents=True)
    listed, annotations = [], []
    scenes = EmbeddedScenes(images, seed).instances()
    for image, instances in groupby(scenes, key=lambda one: one.image):
        Image.fromarray(image.pixels).save(folder / "images" / image.name)
        height, width = image.pixels.shape[:2]
        listed.append({"id": image.id, "file_name": image.name, "width": width, "height": height})
        for one in instances:
            runs = coco.encode(one.mask.astype("uint8", order="F"))
            annotations.append(
                {
                    "id": one.annotation_id,
                    "image_id": image.id,
                    "category_id": tuple(OBJECT_KINDS).index(one.category) + 1,
                    "segmentation": {**runs, "counts": runs["counts"].decode()},
                    "area": one.area,
                    "iscrowd": 0,
                }
            )
    categories = [{"id": number, "name": kind} for number, kind in enumerate(OBJECT_KINDS, 1)]
    content = {"images": listed, "annotations": annotations, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(content))
    return folder / "instances.json"
