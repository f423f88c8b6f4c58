"""Bulk runs: files of texts to files of vectors, in shards that are written whole, and resumed after any end."""
