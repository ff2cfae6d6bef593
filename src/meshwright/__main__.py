"""`python -m meshwright`: the command line tool, for a place where its script is not on the path."""

from __future__ import annotations

# The guard matters: a rank's process imports the main module of its launcher, and must not start another launch.
if __name__ == "__main__":
    from meshwright.cli.main import main

    raise SystemExit(main())
