"""Readers of late-interaction checkpoints.

`layouts.py` recognizes the layout and makes the `Card`. `colbert.py` reads the files of Stanford's ColBERT, PyLate and Sentence
Transformers. Knows nothing of MaxSim.
"""
