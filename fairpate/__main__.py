"""The command line: `fairpate`, or ``python -m fairpate``."""

import sys

# 128 + SIGINT, as :mod:`fairpate.cli.base` has it, which may not be loaded yet.
_INTERRUPTED = 130


def main() -> None:
    """Load the commands, and run the command that the command line names. Ctrl-C during loading, too, ends with exit
    code 130."""
    try:
        from fairpate import cli
    except KeyboardInterrupt:
        sys.stderr.write("error Interrupted.\n")
        sys.exit(_INTERRUPTED)
    cli.main()


if __name__ == "__main__":
    main()
