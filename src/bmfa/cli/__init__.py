"""The command line: each command parses its options, calls one experiment and shows the record."""

from bmfa.cli.app import main

__all__ = ["main"]
