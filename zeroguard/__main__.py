"""``python -m zeroguard``: the command line."""

from zeroguard.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
