"""Readers of config.json: an `Encoder`, without tokenizer, pooling or heads."""
