"""The measures that the experiments share."""

import math

import numpy as np
import pytest
import torch

from bmfa.evidence import metrics


def test_measures_of_single_images_in_float64():
    full = torch.tensor([[0.0, 0.0], [0.0, math.log(3.0)]])
    changed = torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)]])
    # Uniform against (1/4, 3/4): log(1/2) - (log(1/4) + log(3/4)) / 2.
    expected = -math.log(2) - (math.log(1 / 4) + math.log(3 / 4)) / 2
    found = metrics.output_kl(full, changed)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([expected, 0.0], abs=1e-7)
    assert metrics.compare(full, changed, [0, None])["agreeing"].tolist() == [False, True]
    first = torch.tensor([[[True, True], [False, False]], [[False, False], [False, False]]])
    second = torch.tensor([[[True, False], [False, True]], [[False, False], [False, False]]])
    assert metrics.mask_iou(first, second).tolist() == pytest.approx([1 / 3, 1.0])


def test_the_interval_covers_the_mean_at_its_rate():
    """Of 100 samples with a known mean, about 95 intervals cover it (at least 88: p < 0.002)."""
    samples = np.random.default_rng(0).normal(0.5, 1.0, (100, 60))
    intervals = [metrics.interval(sample, 0) for sample in samples]
    assert 88 <= sum(low <= 0.5 <= high for low, high in intervals) <= 100
    width = np.mean([high - low for low, high in intervals])
    assert width == pytest.approx(2 * 1.96 / math.sqrt(60), rel=0.1)
