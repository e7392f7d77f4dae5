"""The parts of a probe shared between processes, and kept in a file of partial results."""

import base64
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bmfa.data import EmbeddedScenes, InstanceFiles, ProbeBlock, ProbeSettings, Tally
from bmfa.data.instances import InstanceSource
from bmfa.data.probe_stream import Compute, Result, Spread
from bmfa.experiments import shards
from bmfa.experiments.resuming import Part, digest, open_checkpoint

# The arrays of a block that are worth packing, and their types.
_ARRAYS: dict[str, np.dtype[Any]] = {"edge": np.dtype(np.float64), "minority": np.dtype(np.bool_)}
_COLUMNS: dict[str, np.dtype[Any]] = {
    "box": np.dtype(np.int64),
    "picture_id": np.dtype(np.int64),
    "annotation_id": np.dtype(np.int64),
    "area": np.dtype(np.float64),
}
_WORDS = ("category", "size", "frequency")


def spread(
    source: InstanceSource,
    settings: ProbeSettings,
    strict: bool,
    resume: str | os.PathLike[str] | None,
) -> Spread | None:
    """How the parts of a source are computed; None where one process does it without a file."""
    processes = shards.current()
    if resume is None and processes.count == 1:
        return None
    checkpoint = open_checkpoint(
        resume,
        "probe",
        lambda: {**asdict(settings), "strict": strict, "pictures": len(source), **_origin(source)},
        _fits,
        processes,
    )

    def compute_all(parts: Iterator[InstanceSource], compute: Compute) -> Iterator[Result]:
        every = list(parts)
        known: dict[int, Part] = processes.from_first(
            lambda: {} if checkpoint is None else dict(checkpoint.parts)
        )
        left = [number for number in range(len(every)) if number not in known]
        reached = 0
        with closing(compute(every[n] for n in processes.mine(left))) as results:  # type: ignore[type-var]
            rounds = processes.rounds(left, lambda number: packed(next(results)))
            for done in rounds:
                known |= dict(done)
                if checkpoint is not None:
                    checkpoint.keep(dict(done))
                while reached in known:
                    yield unpacked(known[reached], strict)
                    reached += 1
        if checkpoint is not None:
            checkpoint.write()
        yield from (unpacked(known[number], strict) for number in range(reached, len(every)))

    return compute_all


def packed(result: Result) -> Part:
    """The result of a part as JSON holds it, every number exact."""
    pictures, block, tally = result
    return {
        "pictures": pictures,
        "faults": dict(tally.faults),
        "left_out": dict(tally.left_out),
        "names": tally.names,
        "block": None if block is None else _packed_block(block),
    }


def unpacked(part: Part, strict: bool = False) -> Result:
    """Undo `packed`."""
    tally = Tally(strict, Counter(part["faults"]), Counter(part["left_out"]), dict(part["names"]))
    block = None if part["block"] is None else _unpacked_block(part["block"])
    return int(part["pictures"]), block, tally


def _packed_block(block: ProbeBlock) -> dict[str, Any]:
    return {
        "shape": list(block.edge.shape),
        **{name: _pack(getattr(block, name)) for name in _ARRAYS},
        **{name: getattr(block, name).tolist() for name in _COLUMNS},
        **{name: list(getattr(block, name)) for name in _WORDS},
    }


def _unpacked_block(content: dict[str, Any]) -> ProbeBlock:
    fields: dict[str, Any] = {name: tuple(content[name]) for name in _WORDS}
    for name, kind in _COLUMNS.items():
        fields[name] = np.array(content[name], kind)
    for name, kind in _ARRAYS.items():
        data = zlib.decompress(base64.b64decode(content[name]))
        fields[name] = np.frombuffer(data, kind).reshape(content["shape"])
    return ProbeBlock(**fields)


def _pack(array: NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 1)).decode()


def _fits(part: Part) -> bool:
    try:
        _, block, _ = unpacked(part)
        return block is None or all(
            len(getattr(block, name)) == len(block) for name in (*_COLUMNS, *_WORDS)
        )
    except (KeyError, TypeError, ValueError, zlib.error):
        return False


def _origin(source: InstanceSource) -> dict[str, Any]:
    """What tells a source from others."""
    if isinstance(source, InstanceFiles):
        annotations = Path(source.annotations.path)
        return {"annotations": digest([annotations.read_bytes()])}
    if isinstance(source, EmbeddedScenes):
        return {"scenes": asdict(source)}
    return {"source": type(source).__name__}
