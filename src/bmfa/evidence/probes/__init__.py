"""Instance probes on annotated pictures."""
