"""`python -m whimbrel` is the `whimbrel` command."""

from whimbrel.cli.main import main

if __name__ == "__main__":
    main()
