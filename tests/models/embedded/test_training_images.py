"""The images of the training: their views and their grain."""

import numpy as np
import pytest
import torch

from bmfa.data.drawn.badges import draw_badge_batch, grain_weights
from bmfa.models.embedded.training_images import augment


def test_views_are_the_symmetries_of_the_square_and_the_inverse():
    image = torch.arange(9.0).view(1, 1, 3, 3) + 1
    coins = torch.cartesian_prod(*[torch.tensor([False, True])] * 4).T.reshape(4, 16, 1, 1, 1)
    views = augment(image.expand(16, -1, -1, -1), coins)
    assert len({tuple(v.flatten().tolist()) for v in views}) == 16
    assert torch.equal(views[0], image[0])
    assert all(v.abs().sum() == image.sum() for v in views)


def test_the_grain_of_the_device_is_that_of_the_images():
    weights = torch.from_numpy(grain_weights(128)).double()
    assert weights.sum(1).numpy() == pytest.approx(np.ones(128), abs=1e-6)
    plain = draw_badge_batch(0, [5], grain=0.0)[0].astype(float)
    grained = draw_badge_batch(0, [5], grain=20.0)[0].astype(float)
    noise = (grained - plain)[0]
    inside = (grained[0] > 0).all(-1) & (grained[0] < 255).all(-1)
    assert np.abs(noise[inside] - noise[inside][:, :1]).max() <= 1  # grey, up to the rounding
    # The noise of a row lies in the span of the weights, that of the knots times the other axis.
    values, basis = noise[..., 0], weights.numpy()
    fitted = basis @ np.linalg.lstsq(basis, values, rcond=None)[0]
    columns = inside.all(0)  # clipped pixels elsewhere are not in the span
    assert columns.any() and np.abs(fitted - values)[:, columns].max() < 3
    assert 8 < noise[inside].std() < 12  # of a product of two bilinear waves with amplitude 20
