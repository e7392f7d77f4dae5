"""Pictures of a folder or a zip, read in place."""

import io
import os
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
from numpy.typing import NDArray

from bmfa.data.extras import load

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
MAX_PIXELS = 89_000_000
MAX_FILE_BYTES = 256 * 2**20


class PictureError(ValueError):
    """A picture, or a folder or zip of them, that cannot be used."""


class PictureFiles:
    """The pictures below a folder, or in a zip, by their paths relative to it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir() and not self.path.is_file():
            raise PictureError(
                f"no folder or zip at {self.path}; pass the folder or zip of the pictures"
            )

    def __getstate__(self) -> dict[str, Path]:
        # The listing can be large, and reading an entry does not need it.
        return {"path": self.path}

    @cached_property
    def entries(self) -> tuple[str, ...]:
        """Relative paths of all pictures, sorted."""
        names = _folder_names(self.path) if self.path.is_dir() else _zip_names(self.path)
        return tuple(sorted(name for name in names if _is_picture(name)))

    @cached_property
    def _by_base_name(self) -> dict[str, list[str]]:
        index: dict[str, list[str]] = {}
        for entry in self.entries:
            index.setdefault(PurePosixPath(entry).name, []).append(entry)
        return index

    def find(self, names: Sequence[str]) -> str | None:
        """The entry that one of `names` means, the first that fits; None where none is here.

        A name fits an entry by its own path or by the end of it, so `val2017/1.jpg` and `1.jpg` both
        find `coco/val2017/1.jpg`, and `val2017/1.jpg` finds `1.jpg`.
        """
        ambiguous: list[str] = []
        for name in names:
            fitting = self._fitting(name)
            if len(fitting) == 1:
                return fitting[0]
            ambiguous = ambiguous or fitting
        if ambiguous:
            raise PictureError(
                f"{names[0]} is in {len(ambiguous)} places of {self.path}: {', '.join(ambiguous[:3])}; "
                "pass the folder that holds the right one"
            )
        return None

    def _fitting(self, name: str) -> list[str]:
        same_base = self._by_base_name.get(PurePosixPath(name).name, [])
        same_path = [entry for entry in same_base if entry == name]
        same_end = [entry for entry in same_base if entry.endswith("/" + name)]
        return same_path or same_end or same_base

    def read(self, entry: str) -> NDArray[np.uint8]:
        """The picture as (height, width, 3) RGB in 8 bits, as it is stored: EXIF turns nothing."""
        return decode_picture(self._read_bytes(entry), entry)

    def _read_bytes(self, entry: str) -> bytes:
        _check_inside(self.path, entry)
        try:
            if self.path.is_dir():
                file = self.path / entry
                _check_bytes(entry, file.stat().st_size)
                return file.read_bytes()
            archive = _open_zip(self.path, os.getpid())
            _check_bytes(entry, archive.getinfo(entry).file_size)
            return archive.read(entry)
        except (OSError, KeyError, RuntimeError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise PictureError(f"{entry} in {self.path} cannot be read: {error}") from error


def decode_picture(data: bytes, name: str) -> NDArray[np.uint8]:
    """An encoded picture as (height, width, 3) RGB in 8 bits."""
    image_module = load("PIL.Image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = image_module.open(io.BytesIO(data), formats=_FORMATS)
            _check_header(name, image.mode, *image.size)
            # A palette's transparency would otherwise be dropped with a warning.
            image = image.convert("RGBA") if "transparency" in image.info else image
            return np.array(image.convert("RGB"))
    except image_module.DecompressionBombError as error:
        raise PictureError(f"{name} is refused as a decompression bomb: {error}") from error
    except PictureError:
        raise
    except Exception as error:
        # A decoder fed with damaged bytes raises whatever it stumbles over.
        reason = str(error).replace("\n", " ")
        raise PictureError(
            f"{name} is no readable {', '.join(_FORMATS)} picture: {reason}"
        ) from error


def _check_header(name: str, mode: str, width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise PictureError(
            f"{name} is refused as a decompression bomb: its header claims {width} x {height} pixels, "
            f"the limit is {MAX_PIXELS:,}; make it smaller first"
        )
    if mode not in _MODES:
        raise PictureError(f"{name} has Pillow mode {mode}; convert it to 8 bits a channel first")


def _check_bytes(entry: str, size: int) -> None:
    if size > MAX_FILE_BYTES:
        raise PictureError(
            f"{entry} is refused: it unpacks to {size:,} bytes, the limit is {MAX_FILE_BYTES:,}"
        )


def _is_picture(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def _folder_names(folder: Path) -> Iterator[str]:
    visited: set[str] = set()
    for root, folders, files in os.walk(folder, followlinks=True):
        # Data sets are often linked into place, and a link may lead back to a parent.
        real = os.path.realpath(root)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        relative = Path(root).relative_to(folder)
        yield from ((relative / file).as_posix() for file in files)


def _zip_names(path: Path) -> list[str]:
    names = _open_zip(path, os.getpid()).namelist()
    for name in names:
        _check_inside(path, name)
    return names


def _check_inside(path: Path, name: str) -> None:
    # A Windows path knows both slashes, drive letters and shares.
    place = PureWindowsPath(name)
    if place.anchor or ".." in place.parts:
        raise PictureError(
            f"{path} is refused: its entry {name!r} leads out of it; use plain relative paths"
        )


# One open archive for each process: after a fork two processes would share one file position.
@lru_cache(maxsize=8)
def _open_zip(path: Path, process: int) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise PictureError(f"{path} is neither a folder nor a readable zip: {error}") from error
