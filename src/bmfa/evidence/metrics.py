"""Measures that the experiments share: change of outputs, overlap of masks, means and intervals."""

from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bmfa.records import Row

RESAMPLES = 10_000  # of the bootstrap: the ends of a 95 % interval repeat to a tenth of a point


def output_kl(full: Tensor, changed: Tensor) -> Tensor:
    """Return the divergence KL(full || changed) of the class distributions of every image.

    Args:
        full: (B, classes) logits of the full model.
        changed: (B, classes) logits of the changed model.

    Returns:
        (B,) float64, in nats.

    Example:
        >>> logits = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
        >>> output_kl(logits, logits).tolist()
        [0.0, 0.0]
    """
    before, after = (logits.double().log_softmax(-1) for logits in (full, changed))
    return (before.exp() * (before - after)).sum(-1)


def compare(
    full: Tensor, changed: Tensor, labels: Sequence[int | None] | Tensor
) -> dict[str, Tensor]:
    """Compare the outputs of a changed model with those of the full model, image by image.

    Args:
        full: (B, classes) logits of the full model.
        changed: (B, classes) logits of the changed model.
        labels: (B,) classes, None where unknown.

    Returns:
        (B,) each: `agreeing`, `right` and `top5` torch.bool, `output_kl` float64 in nats. `right` and
        `top5` are False without a label. Scores that tie with that of the label do not exclude it from
        the first five.

    Example:
        >>> logits = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
        >>> {name: found.tolist() for name, found in compare(logits, -logits, [0, None]).items()}
        ... # doctest: +NORMALIZE_WHITESPACE, +ELLIPSIS
        {'agreeing': [False, False], 'right': [True, False], 'top5': [True, False], 'output_kl': [...]}
    """
    known = torch.tensor([-1 if label is None else int(label) for label in labels])
    known = known.to(changed.device)
    own = changed.gather(1, known.clamp(min=0)[:, None])
    return {
        "agreeing": full.argmax(-1) == changed.argmax(-1),
        "right": changed.argmax(-1) == known,
        "top5": ((changed > own).sum(1) < 5) & (known >= 0),
        "output_kl": output_kl(full, changed),
    }


def mask_iou(first: Tensor, second: Tensor) -> Tensor:
    """Return the intersection over union of (B, ...) torch.bool masks.

    Returns:
        (B,) float64; 1 where both masks are empty.

    Example:
        >>> a, b = torch.tensor([[True, True, False]]), torch.tensor([[True, False, False]])
        >>> float(mask_iou(a, b))
        0.5
    """
    both, either = ((first & second).flatten(1).sum(1), (first | second).flatten(1).sum(1))
    return torch.where(either > 0, both.double() / either.clamp(min=1), 1.0)


def interval(gain: NDArray[np.float64], seed: int) -> tuple[float, float]:
    """Return the 95 % interval of the mean of paired differences, by resampling the images.

    Args:
        gain: (images,) differences.
        seed: Seed of the resampling.

    Example:
        >>> interval(np.zeros(5), 0)
        (0.0, 0.0)
    """
    random = np.random.default_rng(seed)
    picked = random.integers(0, len(gain), (RESAMPLES, len(gain)))
    low, high = np.quantile(gain[picked].mean(1), (0.025, 0.975))
    return float(low), float(high)


def gain_columns(agreeing: NDArray[np.float64], baseline: NDArray[np.float64], seed: int) -> Row:
    """Return the gain in agreement over a baseline on the same images, in points with its interval.

    Args:
        agreeing: (images,) 1 where the class is that of the full model.
        baseline: The same of the baseline.
        seed: Seed of the bootstrap.
    """
    gain = agreeing - baseline
    low, high = interval(gain, seed)
    return {
        "gain_pp": 100 * float(gain.mean()),
        "gain_low_pp": 100 * low,
        "gain_high_pp": 100 * high,
    }


def relative_errors(output: Tensor, expected: Tensor) -> Tensor:
    """Return (B,) relative L2 errors of outputs (B, ...) in float64."""
    wanted = expected.double()
    distances = (output.double() - wanted).flatten(1).norm(dim=1)
    relative: Tensor = distances / wanted.flatten(1).norm(dim=1)
    return relative


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None without any."""
    found = [value for value in values if value is not None]
    return fmean(found) if found else None


def mean_percent(shares: Iterable[float | None]) -> float | None:
    """Return 100 times the mean of the shares that are not None; None without any."""
    found = mean(shares)
    return None if found is None else 100 * found
