"""The command line: `fairpate`, or ``python -m fairpate``."""

import atexit
import gc
import os
import sys

# 128 + SIGINT, as :mod:`fairpate.cli.commands` has it, which may not be loaded yet.
_INTERRUPTED = 130


def main() -> None:
    """Import the commands and run the one that the command line names. Ctrl-C ends with exit code 130, also while they
    are imported."""
    # A process that ends need not look for garbage among all that it imported: with torch that takes half a second.
    atexit.register(gc.freeze)
    # A umask that lets every user write, as some machines have it: nothing that a command or its processes make does.
    if not (umask := os.umask(0o077)) & 0o002:
        umask |= 0o022
    os.umask(umask)
    try:
        from fairpate import cli
    except KeyboardInterrupt:
        sys.stderr.write("error Interrupted.\n")
        sys.exit(_INTERRUPTED)
    cli.main()


if __name__ == "__main__":
    main()
