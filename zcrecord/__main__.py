"""`python -m zcrecord`, the same as the command `zcrecord`."""

import sys

from zcrecord.cli.dispatch import main

if __name__ == "__main__":
    sys.exit(main())
