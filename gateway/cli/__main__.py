"""`python -m gateway.cli` is `chorus`."""

from gateway.cli import main

if __name__ == "__main__":
    main()
