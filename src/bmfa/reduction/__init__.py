"""Token reduction: each policy is immutable, checks its parameters, and says its name."""

from bmfa.reduction.base import Moment, Policy, Step
from bmfa.reduction.crossget import CrossGET
from bmfa.reduction.dct import DCT, GridDCT
from bmfa.reduction.diffrate import DiffRate
from bmfa.reduction.evit import EViT
from bmfa.reduction.fixed_pool import FixedPool
from bmfa.reduction.free_energy import FreeEnergy
from bmfa.reduction.names import parse
from bmfa.reduction.pitome import PiToMe
from bmfa.reduction.random_pool import RandomPool
from bmfa.reduction.tofu import ToFu
from bmfa.reduction.tome import ToMe

__all__ = [
    "DCT",
    "CrossGET",
    "DiffRate",
    "EViT",
    "FixedPool",
    "FreeEnergy",
    "GridDCT",
    "Moment",
    "PiToMe",
    "Policy",
    "RandomPool",
    "Step",
    "ToFu",
    "ToMe",
    "parse",
]
