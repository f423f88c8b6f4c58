"""The recipes of docs/recipes.md, run as they are against a server; those whose program is installed."""

from __future__ import annotations

import gc
import importlib.util
import re
from pathlib import Path

import pytest

from serving import Server

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
PROGRAMS = {
    "LangChain": "langchain_openai", "LlamaIndex": "llama_index", "Haystack": "haystack", "Chroma": "chromadb", "LanceDB": "lancedb",
    "Qdrant": "qdrant_client", "mteb": "mteb",
}  # fmt: skip


def recipes() -> dict[str, list[str]]:
    """The blocks of Python under each heading."""
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    return {section.split("\n", 1)[0]: re.findall(r"```python\n(.*?)```", section, re.DOTALL) for section in sections}


def test_every_program_has_a_recipe() -> None:
    assert list(recipes()) == list(PROGRAMS)
    assert all(recipes().values())


@pytest.mark.filterwarnings("ignore")  # recipes leave their clients open
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_recipe_runs(program: str, server: Server) -> None:
    if importlib.util.find_spec(PROGRAMS[program]) is None:
        pytest.skip(f"{program} is not installed")
    for block in recipes()[program]:
        names: dict[str, object] = {"__name__": "recipe"}
        exec(block.replace("http://127.0.0.1:8000", server.url), names)
        if program == "LangChain" and "embeddings" in names:
            assert len(names["embeddings"].embed_documents(["A wader."])) == 1  # pyright: ignore
        names.clear()
        gc.collect()  # here, where nobody is warned
