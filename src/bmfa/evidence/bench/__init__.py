"""Benchmarks of trees, attention and whole models."""
