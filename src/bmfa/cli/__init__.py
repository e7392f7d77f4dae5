"""The command line: thin, it parses, calls one function, and prints or writes."""

import os
import sys
from collections.abc import Sequence

from bmfa.cli.output import check_target, printing, process_rank, refuse
from bmfa.cli.parser import build_parser
from bmfa.records import made_by_command

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; bad input ends with one line and exit status 2."""
    options = build_parser().parse_args(arguments)
    if process_rank() != 0 and not options.shared:
        return  # one process does what several cannot share
    if options.shared:
        # MKL may add up in another order with another number of threads, and torchrun changes it.
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    try:
        check_target(options.json)
        with made_by_command(sys.argv[1:] if arguments is None else arguments):
            options.run(options)
        with printing():
            pass  # what is still in the buffer
    except BrokenPipeError:
        sys.exit(141)
    except (ValueError, TypeError, OSError, ImportError) as error:
        refuse(str(error))
    except KeyboardInterrupt:
        print("bmfa: interrupted", file=sys.stderr)
        sys.exit(130)
