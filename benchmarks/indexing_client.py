"""An indexing job as people write it: threads that embed chunks with the defaults of a public client. Needs the client alone.

    python indexing_client.py CLIENT URL THREADS CHUNKS MODEL

CLIENT is openai, langchain, llamaindex or haystack. Prints one JSON object: the requests that failed, and the seconds.
"""

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

CHUNKS_PER_CALL: Final = 100
WORDS_PER_CHUNK: Final = 200
"""About 230 tokens."""
_WORDS: Final = (
    "the curlew and its smaller cousin probe soft mud for crabs while flocks of waders rest on the coast before they fly north "
    "to breed in tundra where summers are short and nights hardly dark so that the young can feed around the clock"
).split()

Embed = Callable[[list[str]], int]
"""Embeds texts and returns the number of vectors."""


def openai(url: str, model: str) -> Embed:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    return lambda texts: len(client.embeddings.create(model=model, input=texts).data)


def langchain(url: str, model: str) -> Embed:
    from langchain_openai import OpenAIEmbeddings

    made: Any = OpenAIEmbeddings
    embeddings = made(base_url=f"{url}/v1", api_key="none", model=model, check_embedding_ctx_length=False)
    return lambda texts: len(embeddings.embed_documents(texts))


def llamaindex(url: str, model: str) -> Embed:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    embedding = OpenAILikeEmbedding(model_name=model, api_base=f"{url}/v1", api_key="none")
    return lambda texts: len(embedding.get_text_embedding_batch(texts))


def haystack(url: str, model: str) -> Embed:
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder
    from haystack.utils import Secret

    embedder = OpenAIDocumentEmbedder(
        api_key=Secret.from_token("none"), api_base_url=f"{url}/v1", model=model, progress_bar=False, raise_on_failure=True
    )

    def embed(texts: list[str]) -> int:
        found = embedder.run(documents=[Document(content=text) for text in texts])["documents"]
        return sum(document.embedding is not None for document in found)

    return embed


CLIENTS: Final = {each.__name__: each for each in (openai, langchain, llamaindex, haystack)}


def main() -> None:
    name, url, threads, chunks, model = sys.argv[1:]
    rng = random.Random(0)
    texts = [f"{i} " + " ".join(rng.choices(_WORDS, k=WORDS_PER_CHUNK)) for i in range(int(chunks))]
    embed = CLIENTS[name](url, model)
    calls = [texts[start : start + CHUNKS_PER_CALL] for start in range(0, len(texts), CHUNKS_PER_CALL)]

    def call(part: list[str]) -> str:
        try:
            return "" if embed(part) == len(part) else "vectors are missing"
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]

    started = time.monotonic()
    with ThreadPoolExecutor(int(threads)) as pool:
        reasons = Counter(filter(None, pool.map(call, calls)))
    print(
        json.dumps({"calls": len(calls), "failed": reasons.total(), "reasons": reasons, "seconds": time.monotonic() - started})
    )


if __name__ == "__main__":
    main()
