"""Tiled attention by Triton kernels: pool, score, select, sum residuals, attend."""
