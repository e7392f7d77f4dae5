"""The specification: energies, trees and attention in float64 NumPy, without vectorisation over grids.

Every faster path is tested against these functions.
"""

from bmfa.attention.kernels.reference.energy import (
    free_energy,
    gap,
    lower_bound,
    proxy,
    refinement_score,
    upper_bound,
)
from bmfa.attention.kernels.reference.per_query import (
    attention_error,
    dense_attention,
    per_query_attention,
)
from bmfa.attention.kernels.reference.tiles import tiled_attention
from bmfa.attention.kernels.reference.trees import Box, ReferenceTree, build_tree

__all__ = [
    "Box",
    "ReferenceTree",
    "attention_error",
    "build_tree",
    "dense_attention",
    "free_energy",
    "gap",
    "lower_bound",
    "per_query_attention",
    "proxy",
    "refinement_score",
    "tiled_attention",
    "upper_bound",
]
