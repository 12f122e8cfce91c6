"""Entry point of `python -m flexdilated`: runs the command line and exits with its status."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main(program="python -m flexdilated"))
