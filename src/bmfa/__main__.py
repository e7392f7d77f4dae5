"""`python -m bmfa` runs the `bmfa` command."""

from bmfa.cli import main

main()
