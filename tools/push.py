"""`mmdata push` from a checkout."""

import sys

from mmdata.cli import main

if __name__ == "__main__":
    sys.exit(main(["push", *sys.argv[1:]]))
