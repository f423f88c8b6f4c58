"""Readers of late-interaction checkpoints. `layouts.py` recognizes the layout and makes the `Card`."""
