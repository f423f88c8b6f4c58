"""Checkpoint files -> Card: everything that reads what a checkpoint says of itself. `reader.read_card` is the way in."""
