"""`python -m initwarm`."""

import sys

from initwarm.cli import main

if __name__ == "__main__":
    sys.exit(main())
