"""The preprocessing of a model: resize, centre crop, mean and standard deviation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bmfa.checks import check_integer, check_number
from bmfa.data.images import turn_upright
from bmfa.packages import load_package

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# Pillow's numbers for the filters, as in preprocessor_config.json.
_RESAMPLE: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


@dataclass(frozen=True)
class Preprocessing:
    """Converts an image to the (3, height, width) tensor that a model expects.

    Args:
        size: The height and width of the result in pixels.
        crop_pct: The fraction of the shorter side that the centre crop keeps, in (0, 1]: the image is
            resized so that this side has the crop's side / crop_pct pixels.
        interpolation: `"nearest"`, `"bilinear"`, `"bicubic"` or `"lanczos"`.
        mean: The mean of each channel, for colours in [0, 1].
        std: The standard deviation of each channel.
        squash: If True, the whole image is resized to `size` without a crop, which changes its aspect
            ratio.

    Raises:
        TypeError: If a size is not an integer or `crop_pct` not a number.
        ValueError: If a value is out of range or the interpolation unknown.

    Example:
        >>> import numpy as np
        >>> image = np.zeros((48, 64, 3), np.uint8)
        >>> Preprocessing((32, 32), 0.9)(image).shape
        torch.Size([3, 32, 32])
    """

    size: tuple[int, int] = (224, 224)
    crop_pct: float = 0.875
    interpolation: Interpolation = "bicubic"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    squash: bool = False

    def __post_init__(self) -> None:
        for side in self.size:
            check_integer("size", side, low=1)
        check_number("crop_pct", self.crop_pct, low=0.0, high=1.0, open_low=True)
        if self.interpolation not in get_args(Interpolation):
            accepted = ", ".join(get_args(Interpolation))
            raise ValueError(f"interpolation is {self.interpolation!r}; pass one of {accepted}")

    @classmethod
    def from_timm(cls, settings: Mapping[str, Any]) -> "Preprocessing":
        """Convert the settings of timm.

        Args:
            settings: What `timm.data.resolve_data_config` returns.

        Returns:
            The same preprocessing.

        Example:
            >>> settings = {"input_size": (3, 64, 64), "crop_pct": 0.9, "interpolation": "bilinear"}
            >>> settings |= {"mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_mode": "center"}
            >>> Preprocessing.from_timm(settings).size
            (64, 64)
        """
        size, mean, std = (tuple(settings[name]) for name in ("input_size", "mean", "std"))
        crop_pct, squash = float(settings["crop_pct"]), settings["crop_mode"] == "squash"
        return cls(size[1:], crop_pct, settings["interpolation"], mean, std, squash)

    @classmethod
    def from_transformers(cls, settings: Mapping[str, Any]) -> "Preprocessing":
        """Convert the settings of transformers.

        Args:
            settings: What `to_dict` of an image processor returns.

        Returns:
            The same preprocessing.

        Example:
            >>> Preprocessing.from_transformers({"size": {"height": 64, "width": 64}}).squash
            True
        """
        crops = bool(settings.get("do_center_crop"))
        resized = _sides(settings["size"])
        size = _sides(settings["crop_size"]) if crops else resized
        crop_pct = min(1.0, min(size) / min(resized))
        interpolation = _RESAMPLE.get(settings.get("resample", 3), "bicubic")
        mean = tuple(settings.get("image_mean", IMAGENET_MEAN))
        std = tuple(settings.get("image_std", IMAGENET_STD))
        return cls(size, crop_pct, interpolation, mean, std, squash=not crops)

    def override(
        self,
        *,
        img_size: int | tuple[int, int] | None = None,
        crop_pct: float | None = None,
        interpolation: Interpolation | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> "Preprocessing":
        """Change some settings.

        Args:
            img_size: The side, or (height, width), of the result in pixels.
            crop_pct: The fraction of the shorter side that is kept; also sets `squash` to False.
            interpolation: `"nearest"`, `"bilinear"`, `"bicubic"` or `"lanczos"`.
            mean: The mean of each channel.
            std: The standard deviation of each channel.

        Returns:
            A new `Preprocessing`; arguments that are None keep their value.

        Example:
            >>> Preprocessing().override(img_size=448).size
            (448, 448)
        """
        size = (img_size, img_size) if isinstance(img_size, int) else img_size or self.size
        crop, squash = (self.crop_pct, self.squash) if crop_pct is None else (crop_pct, False)
        channels = tuple(mean or self.mean), tuple(std or self.std)
        return Preprocessing(size, crop, interpolation or self.interpolation, *channels, squash)

    def __call__(self, image: Any) -> Tensor:
        """Preprocess one image.

        Args:
            image: A Pillow image, which is rotated as its EXIF orientation says, or a
                (height, width, 3) uint8 array of RGB.

        Returns:
            (3, height, width) float32 tensor of the size of the model.
        """
        pixels = np.asarray(self._resize(image), dtype=np.float32) / 255
        mean, std = (np.asarray(values, np.float32) for values in (self.mean, self.std))
        normalised = (pixels - mean) / std
        return torch.from_numpy(np.ascontiguousarray(normalised.transpose(2, 0, 1)))

    def batch(self, images: Sequence[NDArray[np.uint8]]) -> Tensor:
        """Preprocess several images.

        Args:
            images: (height, width, 3) uint8 arrays of any sizes.

        Returns:
            (B, 3, height, width) float32 tensor.

        Example:
            >>> import numpy as np
            >>> images = [np.zeros((48, 64, 3), np.uint8)] * 2
            >>> Preprocessing((32, 32), 0.9).batch(images).shape
            torch.Size([2, 3, 32, 32])
        """
        return torch.stack([self(image) for image in images])

    def _resize(self, image: Any) -> Any:
        """Resize and crop; Pillow is needed only if that changes the image."""
        is_array, height, width = isinstance(image, np.ndarray), *self.size
        uncropped = self.squash or self.crop_pct == 1.0
        if is_array and uncropped and image.dtype == np.uint8 and image.shape == (*self.size, 3):
            return image
        pil = load_package("PIL.Image")
        image = (pil.fromarray(image) if is_array else turn_upright(image)).convert("RGB")
        resampling = pil.Resampling[self.interpolation.upper()]
        if self.squash:
            return image.resize((width, height), resampling)
        # The side that needs the larger factor gets its target size, and the other side follows.
        # Sizes are rounded down as in timm; 1e-6 px absorbs the rounding of quotients that are integers.
        targets = [math.floor(side / self.crop_pct + 1e-6) for side in (width, height)]
        along = 0 if targets[0] * image.height >= targets[1] * image.width else 1
        new = [int(targets[along] * side / image.size[along]) for side in image.size]
        new[along] = targets[along]
        image = image if image.size == tuple(new) else image.resize(new, resampling)
        left, top = (new[0] - width) // 2, (new[1] - height) // 2
        return image.crop((left, top, left + width, top + height))


def _sides(size: Mapping[str, int]) -> tuple[int, int]:
    """Return the height and width from `height` and `width`, or `shortest_edge`."""
    side = size.get("shortest_edge", 0)
    return size.get("height", side), size.get("width", side)
