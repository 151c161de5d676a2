"""`python -m steppe`."""

import sys

from steppe.cli import main

if __name__ == "__main__":
    sys.exit(main())
