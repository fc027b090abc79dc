"""``python -m ctxguard``: the command line without the installed script."""

from ctxguard.cli import main

if __name__ == "__main__":
    main()
