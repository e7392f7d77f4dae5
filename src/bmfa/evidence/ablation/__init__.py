"""Ablations of the refinement rule on probe grids."""
