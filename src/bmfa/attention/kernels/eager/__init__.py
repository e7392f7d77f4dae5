"""Attention in torch operations, for any device: over trees."""

from bmfa.attention.kernels.eager.trees import dense, repeated, representative

__all__ = ["dense", "repeated", "representative"]
