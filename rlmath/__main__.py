"""``python -m rlmath`` is ``rlmath``."""

import sys

from rlmath.cli import main

if __name__ == "__main__":
    sys.exit(main())
