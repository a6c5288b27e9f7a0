"""The command line: `fairpate`, or ``python -m fairpate``."""

import atexit
import gc
import sys

# 128 + SIGINT, as :mod:`fairpate.cli.base` has it, which may not be loaded yet.
_INTERRUPTED = 130


def main() -> None:
    """Import the commands and run the one that the command line names. Ctrl-C ends with exit code 130, also while they
    are imported."""
    # A process that ends need not look for garbage among all that it imported: with torch that takes half a second.
    atexit.register(gc.freeze)
    try:
        from fairpate import cli
    except KeyboardInterrupt:
        sys.stderr.write("error Interrupted.\n")
        sys.exit(_INTERRUPTED)
    cli.main()


if __name__ == "__main__":
    main()
