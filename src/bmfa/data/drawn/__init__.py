"""The embedded pictures: glyphs for classification, scenes of objects with masks."""
