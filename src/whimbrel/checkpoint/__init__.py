"""Checkpoint reading.

Finds a checkpoint (`locate.py`) and reads its files into a `Card` (`reader.py`): the encoder, pooling, heads, scores and
tokenizer. Every key of every file must be known, or the checkpoint is refused with file and key. `reader.read_card` is the
entry point. Knows nothing of devices, options or weights.
"""
