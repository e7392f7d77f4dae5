"""Kernels of token merging: reference (NumPy), eager (torch) and triton."""
