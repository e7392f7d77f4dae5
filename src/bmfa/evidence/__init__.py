"""Experiments, each a folder: run, figures and chapter; and the page they make."""
