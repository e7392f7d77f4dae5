"""The embedded pictures: drawn from a seed, never stored."""
