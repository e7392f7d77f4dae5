"""Token reduction: policies that merge or prune tokens between the blocks of a Vision Transformer."""

from bmfa.merging.policies.base import LayerState, Policy, ReducedTokens
from bmfa.merging.policies.crossget import CrossGET
from bmfa.merging.policies.dct import DCT, GridDCT
from bmfa.merging.policies.diffrate import DiffRate
from bmfa.merging.policies.evit import EViT
from bmfa.merging.policies.fixed_pool import FixedPool
from bmfa.merging.policies.free_energy import FreeEnergy
from bmfa.merging.policies.names import POLICY_NAMES, parse
from bmfa.merging.policies.pitome import PiToMe
from bmfa.merging.policies.random_pool import RandomPool
from bmfa.merging.policies.tofu import ToFu
from bmfa.merging.policies.tome import ToMe

__all__ = [
    "DCT",
    "POLICY_NAMES",
    "CrossGET",
    "DiffRate",
    "EViT",
    "FixedPool",
    "FreeEnergy",
    "GridDCT",
    "LayerState",
    "PiToMe",
    "Policy",
    "RandomPool",
    "ReducedTokens",
    "ToFu",
    "ToMe",
    "parse",
]
