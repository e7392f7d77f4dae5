"""Experiments: each a function from settings to records."""
