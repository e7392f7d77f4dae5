"""Backends of attention: reference (NumPy, float64), eager (torch) and triton (CUDA)."""
