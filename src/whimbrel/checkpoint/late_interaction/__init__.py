"""Readers of late-interaction checkpoints. `colbert.py` recognizes the layout and makes the `Card`."""
