"""Triton kernels of token merging."""
