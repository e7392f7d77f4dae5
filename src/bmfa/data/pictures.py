"""Pictures of a folder or a zip, read in place."""

import io
import os
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmfa.packages import load_package

# Files that are listed as pictures. Those of the second line are refused when they are read, with a
# reason: left out of the listing, they would be missing without a word.
SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".bmp"),
    *(".gif", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2"),
)
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
_ACCEPTED = "JPEG, PNG, WEBP or BMP"
# First bytes of files that people take for pictures that can be read.
_SIGNATURES = (
    (0, b"GIF8", "a GIF"),
    (0, b"II*\0", "a TIFF"),
    (0, b"MM\0*", "a TIFF"),
    (4, b"ftyphe", "a HEIC"),
    (4, b"ftypmif", "a HEIF"),
    (4, b"ftypavi", "an AVIF"),
    (4, b"jP  ", "a JPEG 2000"),
    (0, b"%PDF", "a PDF"),
)
# EXIF orientation to the method of PIL.Image.Transpose that turns the picture upright.
_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
MAX_PIXELS = 89_000_000
MAX_FILE_BYTES = 256 * 2**20


class PictureError(ValueError):
    """A picture, or a folder or zip of them, that cannot be used."""


class PicturesLostError(OSError):
    """The folder or zip of the pictures was there when it was listed, and is not any more."""


class PictureFiles:
    """The pictures below a folder, or in a zip, by their paths relative to it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.is_folder = self.path.is_dir()
        if not self.is_folder and not self.path.is_file():
            raise PictureError(
                f"no folder or zip at {self.path}; pass the folder or zip of the pictures"
            )

    def __getstate__(self) -> dict[str, Any]:
        # The listing can be large, and reading an entry does not need it.
        return {"path": self.path, "is_folder": self.is_folder}

    @cached_property
    def entries(self) -> tuple[str, ...]:
        """Relative paths of all pictures, sorted."""
        names = _folder_names(self.path) if self.is_folder else _zip_names(self.path)
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

    def read(self, entry: str, *, upright: bool = True) -> NDArray[np.uint8]:
        """Read one picture.

        Args:
            entry: path of the picture relative to the folder or zip.
            upright: turn the picture as its EXIF orientation says; False reads it as it is stored.

        Returns:
            (height, width, 3) RGB in 8 bits.

        Raises:
            PictureError: this picture cannot be read.
            PicturesLostError: the folder or zip has vanished since it was listed.
        """
        return decode_picture(self._read_bytes(entry), entry, upright=upright)

    def _read_bytes(self, entry: str) -> bytes:
        _check_inside(self.path, entry)
        try:
            if self.is_folder:
                file = self.path / entry
                _check_bytes(entry, file.stat().st_size)
                return file.read_bytes()
            archive = _open_zip(self.path, os.getpid())
            _check_bytes(entry, archive.getinfo(entry).file_size)
            return archive.read(entry)
        except PictureError:
            self._check_present(entry)
            raise
        except (OSError, KeyError, RuntimeError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            self._check_present(entry)
            raise PictureError(f"{entry} in {self.path} cannot be read: {error}") from error

    def _check_present(self, entry: str) -> None:
        """Raise where not the entry is at fault but the place that holds it is gone.

        A disk that was taken away may leave an empty folder behind, or links that lead nowhere.
        """
        file = self.path / entry
        folders = (self.path, file.parent, Path(os.path.realpath(file)).parent)
        for place in folders if self.is_folder else (self.path,):
            reason = _why_gone(place)
            if reason is not None:
                raise PicturesLostError(
                    f"{place} {reason}, so {entry} cannot be read; bring the pictures back and run "
                    "the same command again"
                )


def _why_gone(path: Path) -> str | None:
    """Why a folder with pictures or a zip is no longer there; None where it is."""
    try:
        if path.is_file():
            return None
        with os.scandir(path) as found:
            return None if any(found) else "is empty now"
    except OSError as error:
        return f"cannot be opened any more ({error.strerror})"


def decode_picture(data: bytes, name: str, *, upright: bool = True) -> NDArray[np.uint8]:
    """Decode a picture.

    Args:
        data: content of a JPEG, PNG, WEBP or BMP file.
        name: what to call it in errors.
        upright: turn the picture as its EXIF orientation says; False leaves it as it is stored.

    Returns:
        (height, width, 3) RGB in 8 bits; the first frame of an animation.

    Raises:
        PictureError: no such picture, damaged, or too large.
    """
    image_module = load_package("PIL.Image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = image_module.open(io.BytesIO(data), formats=_FORMATS)
            _check_header(name, image.mode, *image.size)
            image = turn_upright(image) if upright else image
            # A palette's transparency would otherwise be dropped with a warning.
            image = image.convert("RGBA") if "transparency" in image.info else image
            return np.array(image.convert("RGB"))
    except image_module.DecompressionBombError as error:
        raise PictureError(f"{name} is refused as a decompression bomb: {error}") from error
    except PictureError:
        raise
    except load_package("PIL").UnidentifiedImageError:
        raise PictureError(_not_identified(data, name)) from None
    except Exception as error:
        # A decoder fed with damaged bytes raises whatever it stumbles over.
        reason = str(error).replace("\n", " ")
        raise PictureError(f"{name} is no readable {_ACCEPTED} picture: {reason}") from error


def turn_upright(image: Any) -> Any:
    """A Pillow image turned as its EXIF orientation says; the same image where it says nothing."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except Exception:  # damaged EXIF data raise whatever Pillow stumbles over, and say nothing
        return image
    if orientation not in _UPRIGHT:
        return image
    return image.transpose(load_package("PIL.Image").Transpose[_UPRIGHT[orientation]])


def _not_identified(data: bytes, name: str) -> str:
    for start, signature, what in _SIGNATURES:
        if data.startswith(signature, start):
            return f"{name} is {what}, which is not read; save it as {_ACCEPTED}"
    return f"{name} is no picture, or a damaged one; pass {_ACCEPTED}"


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
