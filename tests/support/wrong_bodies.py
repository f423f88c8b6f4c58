"""Wrong bodies of /v1/embeddings, each with the field at fault."""

from __future__ import annotations

WRONG_BODIES: list[tuple[bytes, str | None]] = [
    (b"", None), (b"  \n", None), (b"{", None), (b'{"input": "a', None), (b'{"input": "a"} x', None), (b"null", None), (b"[]", None),
    (b'"a"', None), (b"{}", "input"), (b'{"input": null}', "input"), (b'{"input": 3}', "input"), (b'{"input": {}}', "input"),
    (b'{"input": []}', "input"), (b'{"input": ["a", null]}', "input[1]"), (b'{"input": ["a", 1]}', "input[1]"),
    (b'{"input": [[1], "a"]}', "input[1]"), (b'{"input": [[1], ["a"]]}', "input[1][0]"), (b'{"input": [1, 2.5]}', "input[1]"),
    (b'{"input": [[1, [2]]]}', "input[0][1]"), (b'{"input": [true]}', "input[0]"), (b'{"input": NaN}', None), (b'{"input": [NaN]}', None),
    (b'{"input": [1e400]}', "input[0]"), (b'{"input": [36893488147419103232]}', "input[0]"),
    (b'{"input": [[1, 9223372036854775808]]}', "input[0][1]"), (b'{"input": "\\ud800"}', None), (b'{"input": "\xff"}', None),
    (b'\xef\xbb\xbf{"input": "a"}', None), (b"[" * 100_000, None), (b'{"input":' + b"[" * 100_000, "input[0][0]"),
    (b'{"x":' + b"[" * 100_000, None), (b'{"input": "a", "dimensions": "256"}', "dimensions"),
    (b'{"input": "a", "dimensions": 3.5}', "dimensions"), (b'{"input": "a", "encoding_format": "hex"}', "encoding_format"),
    (b'{"input": "a", "model": 3}', "model"), (b'{"input": "a", "truncate": "middle"}', "truncate"),
    (b'{"input": "a", "truncate_prompt_tokens": -2}', "truncate_prompt_tokens"), (b'{"input": "a", "normalize": 1}', "normalize"),
    (b'{"input": "a", "prompt": "x", "prompt_name": "y"}', "prompt"),
    (b'{"input": [' + b"1" * 5000 + b"]}", "input[0]"),
]  # fmt: skip
