"""Shared by the experiments: batches of images, processes, checkpoints and sums."""

from collections.abc import Callable

Progress = Callable[[int, int], None]  # units done, units in total
