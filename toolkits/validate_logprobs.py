"""``rlmath validate`` as a script."""

import sys

from rlmath.cli import main

if __name__ == "__main__":
    sys.exit(main(["validate", *sys.argv[1:]]))
