"""At least 1,000 texts: the awkward ones, and all lengths around MiniLM's limit of 256 tokens."""

from __future__ import annotations

import random

_WORDS = "the of a whimbrel wader bill flies north river search vector model engine query passage light number city".split()
_RNG = random.Random(20)


def words(count: int) -> str:
    return " ".join(_RNG.choices(_WORDS, k=count))


AWKWARD = [
    "", " ", "a", ".", "\n\t", "\x00", "🙂", "👩‍👩‍👧‍👦🏳️‍🌈", "שלום עולם", "مرحبا بالعالم، كيف الحال؟", "日本語のテキスト", "a\u0301\u0327 e\u0301",
    "\u202eright-to-left override", "[SEP] [CLS] [PAD] [MASK]", "x" * 5000, "https://example.org/" + "a/" * 400,
    "ＦＵＬＬ　ＷＩＤＴＨ", "İstanbul ŞEKER straße", "a\u2028b\u2029c", words(5000),
]  # fmt: skip
TEXTS = [
    *AWKWARD,
    *(words(count) for count in range(1, 300)),
    *("whimbrel " * count for count in range(240, 270)),
    *(words(_RNG.randint(1, 40)) for _ in range(660)),
]
