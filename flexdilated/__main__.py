"""`python -m flexdilated`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main(program="python -m flexdilated"))
