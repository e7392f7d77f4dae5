"""The synthetic stress test."""
