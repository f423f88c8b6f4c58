"""The `whimbrel` command as `python -m whimbrel`."""

from whimbrel.cli.main import main

if __name__ == "__main__":
    main()
