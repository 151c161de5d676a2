"""`python -m steppe`."""

import sys

from steppe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
