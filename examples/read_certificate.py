"""Read what screened attention knows about its own error: probes, audit, certificate and fallback.

Run with: python examples/read_certificate.py
"""

import torch
from torch.nn.functional import interpolate, scaled_dot_product_attention

import bmfa

# Smooth random q, k, v of 2 heads on a 48x48 grid, (1, 2, 2304, 32) each.
torch.manual_seed(0)
grid = (48, 48)
smooth = interpolate(torch.randn(6, 32, 6, 6), size=grid, mode="bicubic")
q, k, v = smooth.flatten(2).mT.reshape(3, 1, 2, 2304, 32)
exact = scaled_dot_product_attention(q, k, v)


def relative_error(output: torch.Tensor) -> float:
    """Return the relative L2 error of an attention output."""
    return float((output - exact).norm() / exact.norm())


print("Tiles, with a target of 2 % for the error of the output:")
tiles = bmfa.screened_attention(
    q, k, v, grid=grid, error=0.02, allow_dense=False, audit=0.1, certificate="scores"
)
stats = tiles.stats
print(f"  backend {stats.backend}, {stats.density:.1%} of the tiles expanded")
print(f"  true error of the output: {relative_error(tiles.output):.2%}")
# Probes are queries that are also attended exactly. Every call has them; an audit is extra.
print(f"  measured by probes: {stats.error.estimate:.2%} +- {stats.error.uncertainty:.2%}")
print(f"  audit of {stats.audit.queries} queries: mean {stats.audit.mean:.2%}")
# The certificate bounds the distance of every output from the exact one.
distance = (tiles.output - exact).norm(dim=-1)
print(f"  distance to the exact output: max {distance.max():.4f}")
print(f"  certificate from scores: max {stats.certificate.max():.4f}")
boxes = bmfa.screened_attention(
    q, k, v, grid=grid, error=0.02, allow_dense=False, certificate="boxes"
)
print(f"  certificate from boxes: max {boxes.stats.certificate.max():.4f}")

print("The same, with queries whose relative error may exceed 5 % recomputed exactly:")
fallback = bmfa.screened_attention(q, k, v, grid=grid, error=0.02, allow_dense=False, fallback=0.05)
print(f"  {fallback.stats.fallback} of {q.shape[1] * q.shape[2]} queries recomputed")
print(f"  true error of the output: {relative_error(fallback.output):.2%}")

print("A tree for each query, E at most 0.05:")
rule = bmfa.rules.Optimal(error=0.05)
trees = bmfa.screened_attention(q, k, v, grid=grid, rule=rule, certificate=True)
print(f"  leaves: {trees.stats.leaf_ratio:.1%} of the tokens")
print(f"  bound on E: max {trees.stats.energy_bound.max():.4f}")
distance = (trees.output - exact).norm(dim=-1)
bound = trees.stats.certificate
print(f"  distance to the exact output: max {distance.max():.3f}, certificate {bound.max():.3f}")
