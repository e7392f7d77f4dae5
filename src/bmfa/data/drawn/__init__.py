"""The embedded images: badges for classification, scenes of objects with masks."""
