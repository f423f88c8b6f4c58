"""Readers of Sentence Transformers' files, without the encoder's config.json."""
