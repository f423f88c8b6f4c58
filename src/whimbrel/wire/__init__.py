"""Encoding of arrays as JSON, base64, raw bytes, npy and Arrow, without a Python object per float or a copy before encoding."""
