"""The `whimbrel` command line."""
