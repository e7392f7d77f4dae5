"""The embedded pictures: badges for classification, scenes of objects with masks."""
