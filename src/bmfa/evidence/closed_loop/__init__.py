"""Screening inside a model: how far its outputs move."""
