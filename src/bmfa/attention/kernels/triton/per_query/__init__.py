"""A tree for each query and head on small grids, in one Triton kernel."""
