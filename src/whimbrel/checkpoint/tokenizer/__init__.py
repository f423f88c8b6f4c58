"""Readers of a checkpoint's tokenizer files: settings (`config.py`), their reading (`reading.py`), and what it makes of
tokenizer.json (`contents.py`)."""
