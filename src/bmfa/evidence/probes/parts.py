"""The parts of a probe: shared between processes and saved to a checkpoint."""

import base64
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmfa.data import EmbeddedScenes, InstanceFiles, ProbeBlock, ProbeSettings, Tally
from bmfa.data.coco import FILE_FAULTS, InstancePart
from bmfa.data.instances import SIZES, InstanceSource
from bmfa.data.probes import Compute, Result, Spread
from bmfa.evidence.runner import processes as shards
from bmfa.evidence.runner.resume import Part, digest, open_checkpoint

# Arrays of a block that are compressed, and columns that are stored as lists.
_ARRAYS: dict[str, np.dtype[Any]] = {"edge": np.dtype(np.float64), "minority": np.dtype(np.bool_)}
_COLUMNS: dict[str, np.dtype[Any]] = {
    "box": np.dtype(np.int64),
    "image_id": np.dtype(np.int64),
    "annotation_id": np.dtype(np.int64),
    "area": np.dtype(np.float64),
}
_WORDS = ("category", "size", "frequency")


def resumable(
    source: InstanceSource,
    settings: ProbeSettings,
    strict: bool,
    resume: str | os.PathLike[str] | None,
) -> Spread:
    """Return a function for `probe_blocks` that computes parts in all processes of a run.

    Args:
        source: Annotated images.
        settings: Grid and image size.
        strict: True if faulty instances raise.
        resume: File of the parts computed so far, created if missing; None for no file.
    """
    check = partial(_fault, settings.grid)

    def compute_all(parts: Iterator[InstanceSource], compute: Compute) -> Iterator[Result]:
        checkpoint = open_checkpoint(resume, "probe", identity, check)
        if resume is None and shards.current().count == 1:
            with checkpoint:
                yield from compute(parts)
            return
        sources = list(parts)
        listings = [_listing(part) for part in sources]
        with checkpoint as saved:
            processes = saved.processes
            done = {
                number: part
                for number, part in saved.parts.items()
                if number < len(sources) and _is_current(part, listings[number])
            }
            left = [number for number in range(len(sources)) if number not in done]
            results = compute(sources[number] for number in processes.mine(left))
            reached = 0
            with closing(results):  # type: ignore[type-var]
                rounds = processes.rounds(
                    left, lambda number: pack_part(next(results)) | {"listing": listings[number]}
                )
                for computed in rounds:
                    done |= dict(computed)
                    saved.add(dict(computed))
                    while reached in done:
                        yield unpack_part(done[reached], strict)
                        reached += 1
            saved.write()
            yield from (
                unpack_part(done[number], strict) for number in range(reached, len(sources))
            )

    def identity() -> dict[str, Any]:
        return {**asdict(settings), "strict": strict, "images": len(source), **_origin(source)}

    return compute_all


def pack_part(result: Result) -> Part:
    """Return the result of a part as JSON, every number exact."""
    images, block, tally = result
    return {
        "images": images,
        "faults": dict(tally.faults),
        "left_out": dict(tally.left_out),
        "names": tally.names,
        "block": None if block is None else _pack_block(block),
    }


def unpack_part(part: Part, strict: bool = False) -> Result:
    """Return the result of a part from `pack_part`."""
    tally = Tally(strict, Counter(part["faults"]), Counter(part["left_out"]), dict(part["names"]))
    block = None if part["block"] is None else _unpack_block(part["block"])
    return int(part["images"]), block, tally


def _pack_block(block: ProbeBlock) -> dict[str, Any]:
    return {
        "shape": list(block.edge.shape),
        **{name: _compress(getattr(block, name)) for name in _ARRAYS},
        **{name: getattr(block, name).tolist() for name in _COLUMNS},
        **{name: list(getattr(block, name)) for name in _WORDS},
    }


def _unpack_block(content: dict[str, Any]) -> ProbeBlock:
    fields: dict[str, Any] = {name: tuple(content[name]) for name in _WORDS}
    for name, kind in _COLUMNS.items():
        fields[name] = np.array(content[name], kind)
    for name, kind in _ARRAYS.items():
        data = zlib.decompress(base64.b64decode(content[name]))
        fields[name] = np.frombuffer(data, kind).reshape(content["shape"])
    return ProbeBlock(**fields)


def _compress(array: NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 1)).decode()


def _is_current(part: Part, listing: str) -> bool:
    """Return True if the files of a saved part are unchanged and could all be read."""
    return part["listing"] == listing and not any(part["faults"].get(one) for one in FILE_FAULTS)


def _listing(part: InstanceSource) -> str:
    """Return a digest of the files that hold the images of a part."""
    return digest(part.listing()) if isinstance(part, InstancePart) else ""


def _fault(grid: int, number: int, part: Part) -> str | None:
    """Return a phrase about the first impossible value of a saved part, or None."""
    try:
        images, block, tally = unpack_part(part)
        counts = {"images": images, **tally.faults, **tally.left_out}
        columns = (
            {} if block is None else {name: getattr(block, name) for name in (*_COLUMNS, *_WORDS)}
        )
        for name, values in columns.items():
            if len(values) != len(block or ()):
                return f"{name} has {len(values)} values for {len(block or ())} instances"
        if not isinstance(part["listing"], str):
            return f"listing is {part['listing']!r}"
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        return f"it cannot be unpacked ({type(error).__name__}: {error})"
    for name, count in counts.items():
        if not isinstance(count, int) or count < 0:
            return f"the count of {name} is {count!r}, which is not an integer of at least 0"
    if block is None:
        return None
    if block.edge.shape[1:] != (grid, grid):
        return f"its grids have shape {block.edge.shape[1:]}, and not {(grid, grid)}"
    for name, low, high in (("edge", 0.0, 1.0), ("area", 0.0, sys.float_info.max)):
        values = getattr(block, name)
        outside = values[~((values >= low) & (values <= high))]
        if len(outside):
            return f"{name} is {outside[0]}, outside the range {low:g} to {high:g}"
    unknown = next((size for size in block.size if size not in SIZES), None)
    return None if unknown is None else f"size is {unknown!r}, and none of {', '.join(SIZES)}"


def _origin(source: InstanceSource) -> dict[str, Any]:
    """Return what identifies a source."""
    if isinstance(source, InstanceFiles):
        annotations = Path(source.annotations.path)
        return {"annotations": digest([annotations.read_bytes()])}
    if isinstance(source, EmbeddedScenes):
        return {"scenes": asdict(source)}
    return {"source": type(source).__name__}
