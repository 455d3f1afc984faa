"""`mmdata bench` from a checkout."""

import sys

from mmdata.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
