"""Checkpoint reading: `locate.py` finds a checkpoint, and `reader.read_card` reads its files into a `Card`."""
