"""Accuracy, cost and speed of models under each method."""
