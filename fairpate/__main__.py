"""``python -m fairpate``: the command line."""

from fairpate.app.cli import main

main()
