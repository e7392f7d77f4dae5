"""The specification: energies, trees and screened attention in float64 NumPy, grid by grid."""

from bmfa.attention.kernels.reference.attention import attention, attention_error, dense_attention
from bmfa.attention.kernels.reference.blocks import Box, ReferenceTree
from bmfa.attention.kernels.reference.energies import (
    free_energy,
    gap,
    lower_bound,
    proxy,
    refinement_score,
    upper_bound,
)
from bmfa.attention.kernels.reference.tiled import tiled_attention
from bmfa.attention.kernels.reference.tiled_errors import tiled_error
from bmfa.attention.kernels.reference.trees import build_tree

__all__ = [
    "Box",
    "ReferenceTree",
    "attention",
    "attention_error",
    "build_tree",
    "dense_attention",
    "free_energy",
    "gap",
    "lower_bound",
    "proxy",
    "refinement_score",
    "tiled_attention",
    "tiled_error",
    "upper_bound",
]
