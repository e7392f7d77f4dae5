"""Measure, bound and repair what attention loses when it is summarised coarsely."""

__version__ = "0.1.0"
