"""Measure the softmax mass that a block mean hides.

Run with: python examples/measure.py
"""

import torch

import bmfa

# A 16x16 grid of attention scores: 4 of 256 tokens score 6, the rest score 0.
grid = (16, 16)
corner = torch.zeros(grid)
corner[:2, :2] = 6.0
centre = corner.roll((7, 7), dims=(0, 1))

quadrant = torch.arange(4).view(2, 2).repeat_interleave(8, 0).repeat_interleave(8, 1)  # (16, 16)

for name, field in (("corner", corner), ("centre", centre)):
    scores = field.flatten()  # (256,)
    minority_mass = bmfa.energy.gibbs(scores)[scores > 0].sum()
    print(f"Minority in the {name}: {minority_mass:.1%} of the softmax mass")
    print(f"  mean M                {bmfa.energy.mean(scores):.4f}")
    print(f"  free energy F         {bmfa.free_energy(scores):.4f}")
    print(f"  gap G = F - M         {bmfa.gap(scores):.4f}")

    # Gamma is the part of the gap that one split into quadrants would reveal. It is 0 in the centre,
    # where all four quadrants have the same mean: a rule based on Gamma alone stops there.
    print(f"  refinement score      {bmfa.refinement_score(scores, quadrant.flatten()):.4f}")
    for rule in (bmfa.rules.Gamma(0.005), bmfa.rules.Optimal(0.001)):
        tree = bmfa.screen(scores, grid, rule)
        print(f"  {rule!s:<15} {int(tree.leaf_count):>3} leaves, error {tree.error(scores):.4f}")
