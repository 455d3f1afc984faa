"""`mmdata train` from a checkout."""

import sys

from mmdata.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
