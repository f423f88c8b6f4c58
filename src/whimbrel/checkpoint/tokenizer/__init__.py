"""Readers of tokenizer files.

`config.py` reads tokenizer_config.json into a `TokenizerCard`, `vocabulary.py` finds the vocabulary, and `classes.py` rebuilds
tokenizer.json as transformers' tokenizer classes do. Encodes no text.
"""
