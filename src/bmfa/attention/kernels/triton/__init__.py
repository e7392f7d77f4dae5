"""Fused kernels in Triton, for CUDA devices; imported where a call asks for them."""
