"""Readers of a checkpoint's tokenizer files: settings (`config.py`), and tokenizer.json as a class builds it (`classes.py`)."""
