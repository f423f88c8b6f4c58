"""Encoding of arrays as JSON, base64, raw bytes, npy and Arrow, in number types down to one bit.

It needs numpy, ml_dtypes, orjson, pybase64 and msgspec only. It makes no Python object per float and no copy before encoding.
"""
