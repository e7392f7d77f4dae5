"""The specification of tiled attention in float64 NumPy, one group of queries and one tile at a time.

Every backend is tested against it.
"""

from bmfa.attention.kernels.reference.tiles import tiled_attention

__all__ = ["tiled_attention"]
