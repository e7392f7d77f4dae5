"""The tiled form in torch operations, by the steps of the specification.

`heads` arranges tokens in tiles and makes their tangents; `attention` measures the probes, chooses the
thresholds and computes the output.
"""

from bmfa.attention.kernels.eager.tiles.attention import tiled_attention as tiled_attention
