"""The command line. `main` is the console script `chorus`."""


def main() -> None:
    from gateway.cli.app import run

    run()
