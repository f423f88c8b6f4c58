"""Readers of config.json.

`reader.py` chooses the reader of an architecture and makes an `Encoder`: BERT and its descendants, decoders, dialects of code
on the hub, and architectures that transformers runs. Knows nothing of tokenizers, pooling or heads.
"""
