"""The command line. `main` is the console script `chorus`."""

import os


def main() -> None:
    # For engines, before torch is there: its threads would turn for ms after every use, on the cores of our own.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from gateway.cli.app import run

    run()
