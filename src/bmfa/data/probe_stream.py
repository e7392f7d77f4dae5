"""Probes of a whole source of instances, block by block, in one process or several."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from bmfa.data.instances import InstanceSource, Tally
from bmfa.data.probes import ProbeBlock, ProbeSettings, probe_block

_PART_INSTANCES = 128
_PARTS_AHEAD = 2

Progress = Callable[[int, int], None]
_Result = tuple[int, ProbeBlock | None, Tally]


def probe_blocks(
    source: InstanceSource,
    settings: ProbeSettings | None = None,
    *,
    workers: int = 1,
    limit: int | None = None,
    tally: Tally | None = None,
    progress: Progress | None = None,
) -> Iterator[ProbeBlock]:
    """Blocks of probes in the source's order, the same for any number of worker processes.

    At most a few parts for each worker are in memory. What is skipped goes to `tally`, whose `strict`
    decides whether a fault raises; `progress` is called with the pictures done and their number;
    `limit` ends the stream after so many instances.
    """
    from bmfa.checks import check_integer

    check_integer("workers", workers, low=1)
    if limit is not None:
        check_integer("limit", limit, low=1)
    return _blocks(source, settings or ProbeSettings(), workers, limit, tally or Tally(), progress)


def _blocks(
    source: InstanceSource,
    settings: ProbeSettings,
    workers: int,
    limit: int | None,
    tally: Tally,
    progress: Progress | None,
) -> Iterator[ProbeBlock]:
    done = found = 0
    for pictures, block, skipped in _results(source, settings, tally.strict, workers):
        done += pictures
        tally.merge(skipped)
        if progress is not None:
            progress(min(done, len(source)), len(source))
        if block is None:
            continue
        block = block if limit is None else block[: limit - found]
        found += len(block)
        yield block
        if found == limit:
            return


def _results(
    source: InstanceSource, settings: ProbeSettings, strict: bool, workers: int
) -> Iterator[_Result]:
    parts = source.parts(_PART_INSTANCES)
    if workers == 1:
        yield from (_probe_part(part, settings, strict) for part in parts)
        return
    # Spawned, not forked: a fork would copy the locks of the threads that torch may have started.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    try:
        pending: deque[Future[_Result]] = deque()
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


def _probe_part(part: InstanceSource, settings: ProbeSettings, strict: bool) -> _Result:
    tally = Tally(strict)
    block = probe_block(part.instances(tally), settings, tally)
    return len(part), block, tally
