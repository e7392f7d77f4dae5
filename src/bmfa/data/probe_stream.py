"""Probes of a whole source of instances, block by block, in one process or several."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

from bmfa.data.instances import InstanceSource, Tally
from bmfa.data.probes import ProbeBlock, ProbeSettings, probe_block

_PART_INSTANCES = 128
_PARTS_AHEAD = 2

Progress = Callable[[int, int], None]
Result = tuple[int, ProbeBlock | None, Tally]  # pictures of a part, its probes, what was not used
Compute = Callable[[Iterable[InstanceSource]], Iterator[Result]]
# Which parts are computed here, and where the results of the others come from.
Spread = Callable[[Iterator[InstanceSource], Compute], Iterator[Result]]


def probe_blocks(
    source: InstanceSource,
    settings: ProbeSettings | None = None,
    *,
    workers: int = 1,
    limit: int | None = None,
    tally: Tally | None = None,
    progress: Progress | None = None,
    spread: Spread | None = None,
) -> Iterator[ProbeBlock]:
    """Blocks of probes in the source's order, the same for any number of worker processes.

    At most a few parts for each worker are in memory. What is skipped goes to `tally`, whose `strict`
    decides whether a fault raises; `progress` is called with the pictures done and their number;
    `limit` ends the stream after so many instances. `spread` may compute some parts elsewhere.
    """
    from bmfa.checks import check_integer

    check_integer("workers", workers, low=1)
    if limit is not None:
        check_integer("limit", limit, low=1)
    chosen, told = settings or ProbeSettings(), tally if tally is not None else Tally()
    compute = partial(_results, settings=chosen, strict=told.strict, workers=workers)
    parts = source.parts(_PART_INSTANCES)
    results = compute(parts) if spread is None else spread(parts, compute)
    return _blocks(results, len(source), limit, told, progress)


def _blocks(
    results: Iterator[Result],
    total: int,
    limit: int | None,
    tally: Tally,
    progress: Progress | None,
) -> Iterator[ProbeBlock]:
    done = found = 0
    for pictures, block, skipped in results:
        done += pictures
        tally.merge(skipped)
        if progress is not None:
            progress(min(done, total), total)
        if block is None:
            continue
        block = block if limit is None else block[: limit - found]
        found += len(block)
        yield block
        if found == limit:
            return


def _results(
    parts: Iterable[InstanceSource], settings: ProbeSettings, strict: bool, workers: int
) -> Iterator[Result]:
    if workers == 1:
        yield from (_probe_part(part, settings, strict) for part in parts)
        return
    # Spawned, not forked: a fork would copy the locks of the threads that torch may have started.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    try:
        pending: deque[Future[Result]] = deque()
        for part in parts:
            pending.append(pool.submit(_probe_part, part, settings, strict))
            if len(pending) > _PARTS_AHEAD * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"one of {workers} worker processes ended early, out of memory or because the calling "
            "script has no `if __name__ == '__main__':` around its work; add it, or pass workers=1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _probe_part(part: InstanceSource, settings: ProbeSettings, strict: bool) -> Result:
    tally = Tally(strict)
    block = probe_block(part.instances(tally), settings, tally)
    return len(part), block, tally
