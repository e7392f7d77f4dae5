"""The embedded model at 64x64 tokens, patched and not: time, masks, classes and error."""
