"""Readers of a checkpoint's tokenizer files: settings, their reading, and the tokenizer.json that follows."""
