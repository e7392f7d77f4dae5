"""Kernels of token merging: eager (torch) and triton; `tests/merging_oracle.py` specifies them."""
