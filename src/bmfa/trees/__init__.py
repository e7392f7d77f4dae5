"""Quadtrees over a grid: layout, statistics of blocks, rules, construction, sharing, certificates."""
