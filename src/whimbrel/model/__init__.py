"""Models on a device: batches of tokens in, rows of outputs out. The only package that imports torch."""
