"""Attention in torch operations, for any device and with autograd."""

from bmfa.attention.kernels.eager.per_query import dense_attention, tree_attention

__all__ = ["dense_attention", "tree_attention"]
