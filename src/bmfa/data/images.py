"""Read images of a folder or a zip without unpacking it."""

import io
import os
import re
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmfa.packages import load_package

# Files that are listed as images, if no dot begins their names. Those of the second line are refused
# with a reason when they are read; if they were not listed, they would be missing without a message.
_IMAGE_NAME = re.compile(
    r"(?:^|/)[^./][^/]*\.(?:jpe?g|png|webp|bmp"
    r"|gif|tiff?|hei[cf]|avif|jp2)$",
    re.IGNORECASE,
)
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")


class ImageError(ValueError):
    """Raised for an image, or a folder or zip of images, that cannot be used."""


class ImagesLostError(OSError):
    """Raised if the folder or zip of the images has vanished since it was listed."""


class ImageFiles:
    """The images of a folder, with its subfolders, or of a zip.

    A zip is opened once in every process that reads it.

    Args:
        path: folder or zip.

    Raises:
        ImageError: there is no folder or zip at the path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.is_folder = self.path.is_dir()
        self._open_zip: tuple[int, zipfile.ZipFile] | None = None  # with the id of its process
        if not self.is_folder and not self.path.is_file():
            raise ImageError(
                f"no folder or zip at {self.path}; pass the folder or zip of the images"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open_zip": None}

    @cached_property
    def entries(self) -> tuple[str, ...]:
        """Paths of all images relative to the folder or zip, sorted."""
        try:
            names = _folder_names(self.path) if self.is_folder else self._zip().namelist()
        except (OSError, zipfile.BadZipFile) as error:
            raise ImageError(
                f"{self.path} is neither a folder nor a readable zip: {error}"
            ) from error
        return tuple(sorted(filter(_IMAGE_NAME.search, names)))

    @cached_property
    def _by_base_name(self) -> dict[str, list[str]]:
        index: dict[str, list[str]] = defaultdict(list)
        for entry in self.entries:
            index[PurePosixPath(entry).name].append(entry)
        return index

    def find(self, names: Sequence[str]) -> str | None:
        """Find the entry of an image by its possible names.

        A name matches an entry by its full path, by the end of its path, or by its file name alone:
        both `val2017/1.jpg` and `1.jpg` match `coco/val2017/1.jpg`, and `val2017/1.jpg` matches
        `1.jpg`.

        Args:
            names: possible names, best first.

        Returns:
            The entry that the first matching name matches, or None.

        Raises:
            ImageError: the names match several entries and no one alone.
        """
        several: list[str] = []
        for name in names:
            same_base = self._by_base_name[PurePosixPath(name).name]
            same_end = [entry for entry in same_base if entry.endswith("/" + name)]
            matching = [name] if name in same_base else same_end or same_base
            if len(matching) == 1:
                return matching[0]
            several = several or matching
        if several:
            raise ImageError(
                f"{names[0]} matches {len(several)} images in {self.path}: "
                f"{', '.join(several[:3])}; pass the folder that holds the right one"
            )
        return None

    def read(self, entry: str, *, upright: bool = True) -> NDArray[np.uint8]:
        """Read one image.

        Args:
            entry: path of the image relative to the folder or zip.
            upright: True to apply the EXIF orientation; False reads the image as it is stored.

        Returns:
            (height, width, 3) uint8 RGB.

        Raises:
            ImageError: the image cannot be read.
            ImagesLostError: the folder or zip has vanished since it was listed.
        """
        try:
            data = (self.path / entry).read_bytes() if self.is_folder else self._zip().read(entry)
        except Exception as error:  # zipfile raises exceptions of many types on damaged data
            self._check_present(entry)
            raise ImageError(f"{entry} in {self.path} cannot be read: {error}") from error
        return decode_image(data, entry, upright=upright)

    def _zip(self) -> zipfile.ZipFile:
        """Return the open zip; after a fork it is opened again, as processes share file positions."""
        if self._open_zip is None or self._open_zip[0] != os.getpid():
            self._open_zip = os.getpid(), zipfile.ZipFile(self.path)
        return self._open_zip[1]

    def _check_present(self, entry: str) -> None:
        """Raise ImagesLostError if the folder or zip has vanished, rather than one entry.

        A disk that was unmounted may leave an empty folder, or links without a target.
        """
        file = self.path / entry
        folders = (self.path, file.parent, Path(os.path.realpath(file)).parent)
        for path in folders if self.is_folder else (self.path,):
            with suppress(OSError):
                if path.is_file() or any(path.iterdir()):
                    continue
            raise ImagesLostError(
                f"{path} is empty now or cannot be opened any more, so {entry} cannot be read; bring "
                "the images back and run the same command again"
            )


def decode_image(data: bytes, name: str, *, upright: bool = True) -> NDArray[np.uint8]:
    """Decode an image.

    Args:
        data: content of a JPEG, PNG, WEBP or BMP file.
        name: name of the image in error messages.
        upright: True to apply the EXIF orientation; False leaves the image as it is stored.

    Returns:
        (height, width, 3) uint8 RGB; the first frame of an animation.

    Raises:
        ImageError: the data are of another format, damaged, or too large.
    """
    pillow = load_package("PIL.Image")
    try:
        with warnings.catch_warnings(action="ignore"):
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            image = pillow.open(io.BytesIO(data), formats=_FORMATS)
            if image.mode.startswith("I"):
                raise ValueError(f"its mode is {image.mode}; convert it to 8 bits a channel")
            image = turn_upright(image) if upright else image
            # Pillow would drop the transparency of a palette with a warning.
            image = image.convert("RGBA") if "transparency" in image.info else image
            return np.array(image.convert("RGB"))
    except Exception as error:  # decoders raise exceptions of any type on damaged data
        unknown = isinstance(error, load_package("PIL").UnidentifiedImageError)
        reason = "it is of another format, or damaged" if unknown else str(error).rstrip(".")
        raise ImageError(
            f"{name} cannot be decoded: {' '.join(reason.split())}; pass JPEG, PNG, WEBP or BMP"
        ) from error


def turn_upright(image: Any) -> Any:
    """Apply the EXIF orientation to a Pillow image; return it unchanged if it has none."""
    try:
        return load_package("PIL.ImageOps").exif_transpose(image)
    except Exception:  # Pillow raises any exception on damaged EXIF data
        return image


def _folder_names(folder: Path) -> Iterator[str]:
    visited: set[str] = set()
    for root, folders, files in os.walk(folder, followlinks=True):
        # Folders are often links, and a link may lead back to a parent.
        if (real := os.path.realpath(root)) in visited:
            folders.clear()
        else:
            visited.add(real)
            yield from ((Path(root) / file).relative_to(folder).as_posix() for file in files)
