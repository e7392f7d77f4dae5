"""Instance probes on annotated images."""
