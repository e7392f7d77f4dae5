"""Token reduction: each policy is immutable, checks its parameters, and says its name."""

from bmfa.merging.policies.base import Moment, Policy, Step
from bmfa.merging.policies.crossget import CrossGET
from bmfa.merging.policies.dct import DCT, GridDCT
from bmfa.merging.policies.diffrate import DiffRate
from bmfa.merging.policies.evit import EViT
from bmfa.merging.policies.fixed_pool import FixedPool
from bmfa.merging.policies.free_energy import FreeEnergy
from bmfa.merging.policies.names import parse
from bmfa.merging.policies.pitome import PiToMe
from bmfa.merging.policies.random_pool import RandomPool
from bmfa.merging.policies.tofu import ToFu
from bmfa.merging.policies.tome import ToMe

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
