"""`python -m bmfa` is the command."""

from bmfa.cli import main

main()
