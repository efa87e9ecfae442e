"""Run `halfmoon_protocol.schema` as a command."""

import sys

from halfmoon_protocol.schema import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
