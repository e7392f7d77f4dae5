"""Screening inside a model: how far its outputs move, against the leaves that are left."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from bmfa.checks import check_integer
from bmfa.data.imagenet import LabelledPicture
from bmfa.models import LoadedModel, layer_indices, patch, record, unpatch
from bmfa.models.hosts import find_host
from bmfa.records import Record, Row, environment
from bmfa.rules import parse

# The paper's rules at its settings, then what goes past them.
DEFAULT_METHODS = (
    "fixed-blocks:2",
    "global-mean",
    "random-quadrants:0.25",
    "random-quadrants:0.5",
    "quadrant-gap:0.8",
    "quadrant-gap:0.5",
    "gamma:0.05",
    "gamma:0.02",
    "exact-gap:0.5",
    "exact-gap:0.2",
    "mass:0.005",
    "mass:0.002",
    "mass:0.001",
    "optimal:0.005",
    "optimal:0.002",
    "optimal:0.001",
)
FULL = "full"
PROTOCOL = (
    "one tree for each query and head over the spatial keys, prefix keys exact, every query screened; "
    "output_kl is KL(full || approximate); attention_kl is the mean of F - F~ over the spatial keys"
)
Layers = str | Sequence[int]
Progress = Callable[[int, int], None]
