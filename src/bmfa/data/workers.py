"""Worker processes: a DataLoader whose results come in order and whose errors stay readable.

Batches of images for models are read in `bmfa/evidence/runner/batches.py`, probes in `probes.py` here.
"""

import warnings
from collections.abc import Generator
from typing import Any

from torch.utils.data import DataLoader


def make_loader(dataset: Any, workers: int, **options: Any) -> DataLoader[Any]:
    """Return a DataLoader with any number of workers; 0 computes in this process."""
    options["persistent_workers"] = bool(workers) and options.get("persistent_workers", False)
    # More workers than cores are the caller's choice.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return DataLoader(dataset, num_workers=workers, **options)


def iterate(loader: DataLoader[Any]) -> Generator[Any, None, None]:
    """Yield the results of a loader and end its workers when the iteration ends, also by an error.

    Raises:
        Exception: A result that is an exception is raised. Datasets return exceptions rather than
            raise them, because DataLoader would put a traceback into the message.
        RuntimeError: If a worker process died.
    """
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        results = iter(loader)
    try:
        for result in results:
            if isinstance(result, Exception):
                raise result
            yield result
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise RuntimeError(
            f"one of {loader.num_workers} worker processes ended early, probably because memory ran "
            "out; pass fewer workers, such as workers=1"
        ) from error
    finally:
        # Ends the workers now; the garbage collector would wait seconds for each of them.
        del results
