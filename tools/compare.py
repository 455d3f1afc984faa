"""`mmdata compare` from a checkout."""

import sys

from mmdata.cli import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
