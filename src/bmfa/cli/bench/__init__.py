"""bmfa bench: one file a command; `shared.py` has what they share."""
