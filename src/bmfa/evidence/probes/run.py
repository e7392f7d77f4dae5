"""Instance probes: the softmax mass that each method loses on the score grids of real objects."""

import base64
import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bmfa.checks import check_integer
from bmfa.data import InstanceFiles, ProbeBlock, ProbeSettings, Tally
from bmfa.data.coco import FILE_FAULTS, MISSING_IMAGE
from bmfa.data.instances import SIZES, InstanceSource
from bmfa.data.probes import Mode, probe_parts, split_images
from bmfa.evidence.methods import DEFAULT_METHODS
from bmfa.evidence.probes import measure
from bmfa.evidence.runner import Progress
from bmfa.evidence.runner.parts import Part, compute_parts
from bmfa.evidence.score_methods import check_method, estimate_all
from bmfa.grid import Grid
from bmfa.records import Record, Row

DATASETS = ("coco", "lvis", "embedded")
FREQUENCIES = {"f": "frequent", "c": "common", "r": "rare"}
TIMING = "processor time of one thread, from scores to statistics, all methods together"


def run(
    source: InstanceSource,
    *,
    dataset: str,
    mode: Mode,
    methods: Sequence[str] = DEFAULT_METHODS,
    settings: ProbeSettings | None = None,
    workers: int = 1,
    limit: int | None = None,
    strict: bool = False,
    progress: Progress | None = None,
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
) -> Record:
    """Probe every instance of a source with every method.

    Score grids are built by worker processes, in processes joined by torch.distributed, or read from
    a file of partial results, and screened in this process in the order of the source. So the rows
    are the same for any number of workers and processes.

    Args:
        source: Annotated images.
        dataset: `"coco"`, `"lvis"` or `"embedded"`.
        mode: How scores are built: `"image-edge"` or `"mask-only"`.
        methods: Names of summaries and rules.
        settings: Grid and image size.
        workers: Worker processes; 1 builds the grids in this process.
        limit: Number of instances after which the probe ends.
        strict: True to raise at the first faulty instance instead of counting it.
        progress: Called with the images done and their number.
        seed: Seed of random rules.
        resume: File of the grids built so far, created if missing.

    Returns:
        A record of one row for each method and group: all instances, sizes and frequencies.

    Raises:
        ValueError: If an argument is unknown or no instance can be probed.

    Example:
        >>> from bmfa.data import EmbeddedScenes
        >>> scenes = EmbeddedScenes(images=2)
        >>> record = run(scenes, dataset="embedded", mode="mask-only", methods=["edge-aware"])
        >>> record.rows[0]["group"], record.rows[0]["mean_gap"]
        ('all', 0.0)
    """
    settings = settings or ProbeSettings()
    names = check_probe(dataset, mode, methods, settings, seed)
    check_integer("workers", workers, low=1)
    limit = None if limit is None else check_integer("limit", limit, low=1)
    parts = split_images(source)

    def compute(numbers: Sequence[int]) -> Iterator[Part]:
        mine = [parts[number] for number in numbers]
        results = probe_parts(source, mine, settings, strict, workers)
        with closing(results) as found:  # type: ignore[type-var]
            yield from (_pack(block, mode, tally) for block, tally in found)

    def identity() -> dict[str, Any]:
        measured = {"mode": mode, **asdict(settings), "strict": strict}
        return {"experiment": "probe", **measured, "images": len(source), **_origin(source)}

    tally, grid = Tally(strict), Grid(settings.grid, settings.grid)
    scores: list[Tensor] = []
    sizes: list[str] = []
    frequencies: list[str | None] = []
    for part in compute_parts(
        list(map(len, parts)), compute, resume=resume, identity=identity, progress=progress
    ):
        faults, left_out = part["faults"], part["left_out"]
        tally.merge(Tally(strict, Counter(faults), Counter(left_out), part["names"]))
        scores.append(_unpack_scores(part["scores"], grid))
        sizes += part["sizes"]
        frequencies += part["frequencies"]
        if limit is not None and len(sizes) >= limit:
            break
    instances = torch.cat(scores)[:limit] if scores else torch.empty(0)
    measure.check_any_instances(len(instances), tally)
    groups = list(_groups(sizes[:limit], frequencies[:limit]))

    def compute_rows() -> list[Row]:
        estimates = estimate_all(names, instances, grid, tau=measure.TAU, seed=seed)
        return [
            {"dataset": dataset, "mode": mode, "method": name, "group": group}
            | measure.gap_row(name, estimate, grid, members)
            for name, estimate in zip(names, estimates, strict=True)
            for group, members in groups
        ]

    # Builds the tables of the grid, which are not part of the time of an instance.
    estimate_all(names, torch.zeros(1, grid.size, dtype=torch.float64), grid)
    rows, seconds = measure.time_on_one_thread(compute_rows)
    for row in rows:
        if row["group"] != "all":
            del row["gap_quantiles"]
    recorded = {
        "dataset": dataset,
        "mode": mode,
        "methods": list(names),
        **asdict(settings),
        "tau": measure.TAU,
        "workers": workers,
        "limit": limit,
        "strict": strict,
        "seed": seed,
        "protocol": measure.PROTOCOL,
        **measure.describe_source(source, tally),
        "instances": len(instances),
        "timing": TIMING,
        "microseconds_per_instance": 1e6 * seconds / len(instances),
    }
    return Record("probe", recorded, rows)


def _groups(
    sizes: Sequence[str], frequencies: Sequence[str | None]
) -> Iterator[tuple[str, Tensor | slice]]:
    """Yield all instances, then each size and frequency that occurs."""
    yield "all", slice(None)
    members = {size: [one == size for one in sizes] for size in SIZES}
    members |= {name: [one == key for one in frequencies] for key, name in FREQUENCIES.items()}
    yield from ((name, torch.tensor(mask)) for name, mask in members.items() if any(mask))


def _pack(block: ProbeBlock | None, mode: Mode, tally: Tally) -> Part:
    """Return a part as JSON: the score grids of its instances, and what was not used.

    An image that is missing or cannot be read may be there when the run continues.
    """
    data = b"" if block is None else block.scores(mode).tobytes()
    return {
        "skipped": [name for name in (MISSING_IMAGE, *FILE_FAULTS) if tally.faults[name]],
        "scores": base64.b64encode(zlib.compress(data, 1)).decode(),
        "sizes": [] if block is None else list(block.size),
        "frequencies": [] if block is None else list(block.frequency),
        "faults": tally.faults,
        "left_out": tally.left_out,
        "names": tally.names,
    }


def _unpack_scores(text: str, grid: Grid) -> Tensor:
    """Return the (B, N) float64 score grids of a part."""
    data = zlib.decompress(base64.b64decode(text))
    return torch.from_numpy(np.frombuffer(data).reshape(-1, grid.size).copy())


def _origin(source: InstanceSource) -> dict[str, Any]:
    """Return what identifies a source."""
    if isinstance(source, InstanceFiles):
        annotations = source.annotations.read_bytes()
        return {"annotations": hashlib.sha256(annotations).hexdigest()[:16]}
    return {"source": repr(source)}


def check_probe(
    dataset: str, mode: str, methods: Sequence[str], settings: ProbeSettings, seed: int
) -> tuple[str, ...]:
    """Return every method once; raise ValueError for arguments that are not valid."""
    if dataset not in DATASETS:
        raise ValueError(f"dataset is {dataset!r}; pass one of {', '.join(DATASETS)}")
    measure.check_mode(mode)
    if not methods:
        raise ValueError("methods is empty; pass at least one name, such as gamma:0.005")
    if settings.grid < 2:
        raise ValueError(
            f"grid is {settings.grid}, which leaves no block to screen; pass 2 or more"
        )
    return tuple(dict.fromkeys(check_method(name, seed) for name in methods))
