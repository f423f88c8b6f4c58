"""Readers of Sentence Transformers' files.

`modules.py` reads modules.json and the settings of the whole model. The other modules read Pooling, Dense and the like, Router,
sparse heads and static embeddings. Knows nothing of the encoder's config.json.
"""
