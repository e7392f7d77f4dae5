"""Read what screened attention knows about its own error: probes and certificates.

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

print("Tiles, with a target of 2 % for the error of the output:")
tiles = bmfa.screened_attention(q, k, v, grid=grid, error=0.02, allow_dense=False)
stats = tiles.stats
print(f"  backend {stats.backend}, {stats.density:.1%} of the tiles expanded")
error = (tiles.output - exact).norm() / exact.norm()
print(f"  true error of the output: {error:.2%}")
# Probes are queries that are also attended exactly. Every call has them.
print(f"  measured by probes: {stats.error.estimate:.2%} +- {stats.error.uncertainty:.2%}")
# The certificate bounds the distance of every output from the exact one. It computes all scores.
distance = (tiles.output - exact).norm(dim=-1)
certificate = bmfa.certify(q, k, v, tiles)
print(f"  distance to the exact output: max {distance.max():.4f}")
print(f"  certificate: max {certificate.distance.max():.4f}")

print("A tree for each query, E at most 0.05:")
rule = bmfa.rules.Optimal(error=0.05)
trees = bmfa.screened_attention(q, k, v, grid=grid, rule=rule)
certificate = bmfa.certify(q, k, v, trees)
print(f"  leaves: {trees.stats.leaf_ratio:.1%} of the tokens")
print(f"  bound on E: max {certificate.energy.max():.4f}")
distance = (trees.output - exact).norm(dim=-1)
bound = certificate.distance
print(f"  distance to the exact output: max {distance.max():.3f}, certificate {bound.max():.3f}")
