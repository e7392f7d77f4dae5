"""Batches, processes and resumable runs shared by the experiments."""
