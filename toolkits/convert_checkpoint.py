"""``rlmath convert`` as a script."""

import sys

from rlmath.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
