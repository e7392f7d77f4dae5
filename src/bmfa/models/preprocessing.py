"""A model's own preprocessing: resize, centre crop, mean and standard deviation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bmfa.checks import check_integer, check_number
from bmfa.data.pictures import turn_upright
from bmfa.packages import load_package

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# Pillow's numbers of the filters, as preprocessor_config.json gives them.
_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


@dataclass(frozen=True)
class Preprocessing:
    """From a picture to the (3, height, width) tensor that a model was trained on.

    The shorter side is resized to the crop's side / crop_pct and the centre cut out; with `squash`
    the whole picture is resized to the crop's size, whatever its aspect ratio.
    """

    size: tuple[int, int] = (224, 224)  # height, width
    crop_pct: float = 0.875
    interpolation: str = "bicubic"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    squash: bool = False

    def __post_init__(self) -> None:
        for side in self.size:
            check_integer("size", side, low=1)
        check_number("crop_pct", self.crop_pct, low=0.0, high=1.0, open_low=True)
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(
                f"interpolation is {self.interpolation!r}; pass one of {', '.join(INTERPOLATIONS)}"
            )

    @classmethod
    def of_timm(cls, settings: Mapping[str, Any]) -> "Preprocessing":
        """From what timm.data.resolve_data_config gives."""
        _, height, width = settings["input_size"]
        return cls(
            (height, width),
            float(settings["crop_pct"]),
            settings["interpolation"],
            tuple(settings["mean"]),
            tuple(settings["std"]),
            settings["crop_mode"] == "squash",
        )

    @classmethod
    def of_transformers(cls, settings: Mapping[str, Any]) -> "Preprocessing":
        """From the content of a preprocessor_config.json."""
        resized = _sides(settings.get("size", 224))
        crop = settings.get("crop_size") if settings.get("do_center_crop") else None
        size = _sides(crop) if crop is not None else resized
        return cls(
            size,
            min(1.0, min(size) / min(resized)),
            _RESAMPLE.get(settings.get("resample", 3), "bicubic"),
            tuple(settings.get("image_mean", IMAGENET_MEAN)),
            tuple(settings.get("image_std", IMAGENET_STD)),
            crop is None,
        )

    def override(
        self,
        *,
        img_size: int | tuple[int, int] | None = None,
        crop_pct: float | None = None,
        interpolation: str | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> "Preprocessing":
        """The same with what is given changed; a crop_pct keeps the aspect ratio."""
        changes: dict[str, Any] = {
            "size": (img_size, img_size) if isinstance(img_size, int) else img_size,
            "crop_pct": crop_pct,
            "interpolation": interpolation,
            "mean": None if mean is None else tuple(mean),
            "std": None if std is None else tuple(std),
            "squash": None if crop_pct is None else False,
        }
        return replace(self, **{name: v for name, v in changes.items() if v is not None})

    def __call__(self, picture: Any) -> Tensor:
        """Prepare one picture.

        Args:
            picture: a Pillow image, which is turned upright as its EXIF orientation says, or
                (height, width, 3) RGB in 8 bits.

        Returns:
            (3, height, width) of the model's size, float32.
        """
        pixels = np.asarray(self._resized(picture), dtype=np.float32) / 255
        mean, std = (np.asarray(values, np.float32) for values in (self.mean, self.std))
        normal = (pixels - mean) / std
        return torch.from_numpy(np.ascontiguousarray(normal.transpose(2, 0, 1)))

    def batch(self, pictures: Sequence[NDArray[np.uint8]]) -> Tensor:
        """(B, 3, height, width) of some pictures."""
        return torch.stack([self(picture) for picture in pictures])

    def _resized(self, picture: Any) -> Any:
        """The picture at the model's size; Pillow is needed only where that changes it."""
        array, whole = isinstance(picture, np.ndarray), self.squash or self.crop_pct == 1.0
        if array and whole and picture.dtype == np.uint8 and picture.shape == (*self.size, 3):
            return picture
        images = load_package("PIL.Image")
        image = images.fromarray(picture) if array else turn_upright(picture)
        return self._cropped(image.convert("RGB"), images)

    def _cropped(self, image: Any, images: Any) -> Any:
        height, width = self.size
        filter_ = images.Resampling[self.interpolation.upper()]
        if self.squash:
            return image.resize((width, height), filter_)
        # The side that needs the larger factor meets its target, the other side follows.
        targets = [math.floor(side / self.crop_pct + 1e-6) for side in (width, height)]
        along = 0 if targets[0] * image.height >= targets[1] * image.width else 1
        new = [int(targets[along] * side / image.size[along]) for side in image.size]
        new[along] = targets[along]
        image = image if image.size == tuple(new) else image.resize(new, filter_)
        left, top = (new[0] - width) // 2, (new[1] - height) // 2
        return image.crop((left, top, left + width, top + height))


def _sides(size: Any) -> tuple[int, int]:
    """Height and width of the forms that preprocessor_config.json uses."""
    if isinstance(size, int):
        return size, size
    if "shortest_edge" in size:
        return size["shortest_edge"], size["shortest_edge"]
    return size["height"], size["width"]
