"""Stand-ins for the imports of vLLM's tests: a server that is Whimbrel, answers as plain objects, references.

A module of vLLM that has code without a model (`_OWN_CODE`) is read from the released source. The others are empty: their
names are classes that do nothing.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Self

import pytest
import torch
import torch.nn.functional as F

from serving import Server

SOURCE = Path(os.environ.get("VLLM_SOURCE", "."))
_OWN_CODE = {"vllm.utils.serial_utils", "vllm.entrypoints.pooling.utils", "vllm.entrypoints.pooling.scoring.utils"}
ROCM_EXTRA_ARGS: list[str] = []
VLLM_PATH = SOURCE


class Answer(SimpleNamespace):
    """A JSON object. What it does not have is None, or 0 for the counts of tokens that are not read."""

    @classmethod
    def model_validate(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return cls(**{name: cls.model_validate(each) for name, each in value.items()})
        return [cls.model_validate(each) for each in value] if isinstance(value, list) else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0 if name == "completion_tokens" else None


class _Nothing:
    """A name of vLLM's that no test of HTTP uses."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


class _Empty(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "current_platform":
            return SimpleNamespace(is_rocm=lambda: False, is_cpu=lambda: True, is_xpu=lambda: False, is_cuda=lambda: False)
        if name == "get_tokenizer":
            return get_tokenizer
        if name == "hf_api":
            return __import__("huggingface_hub").HfApi
        if name == "init_logger":
            return lambda _: __import__("logging").getLogger("vllm")
        return Answer if name.endswith("Response") else type(name, (_Nothing,), {})


class _Finder(MetaPathFinder, Loader):
    """Finds all modules of vLLM."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in ("vllm", "fastapi"):
            return None
        if name in _OWN_CODE:
            return importlib.util.spec_from_file_location(name, SOURCE / (name.replace(".", "/") + ".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def install() -> None:
    sys.meta_path.insert(0, _Finder())


def get_tokenizer(tokenizer_name: str, **_: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_name)


_TAKEN = {
    "--max-model-len": "--max-length",
    "--dtype": "--dtype",
    "--served-model-name": "--served-name",
    "--api-key": "--api-key",
}
"""Flags of vLLM, and what they are here. Others are dropped: they name facts that are found out here, or features of a GPU."""


def translate(arguments: list[str]) -> list[str]:
    """Return the flags of `whimbrel serve` for those of `vllm serve`."""
    found: list[str] = []
    values = dict(zip(arguments, [*arguments[1:], ""], strict=True))
    for flag, value in values.items():
        if flag in _TAKEN:
            found += [_TAKEN[flag], "float32" if flag == "--dtype" else value]
        elif flag == "--pooler-config" and json.loads(value).get("enable_chunked_processing"):
            found.append("--split-long")
    return found


class RemoteOpenAIServer:
    """`whimbrel serve`, with the methods of vLLM's class of this name."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, vllm_serve_args: list[str], **_: Any) -> None:
        pooling = ["--pooling", "lasttoken"] if "SmolLM2" in model else []
        self._server = Server(model, *pooling, *translate(vllm_serve_args))
        self.host, _, port = self._server.url.removeprefix("http://").partition(":")
        self.port = int(port)

    @property
    def url_root(self) -> str:
        return self._server.url

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> Any:
        import openai

        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client(self, **options: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__(None, None, None)


class HfRunner:
    """The reference: Sentence Transformers, or its CrossEncoder."""

    def __init__(self, model: str, *_: Any, is_cross_encoder: bool = False, **__: Any) -> None:
        from sentence_transformers import CrossEncoder, SentenceTransformer

        self._model: Any = CrossEncoder(model) if is_cross_encoder else SentenceTransformer(model)

    def encode(self, texts: list[str], **_: Any) -> Any:
        return self._model.encode(texts)

    def predict(self, pairs: list[list[str]], **_: Any) -> Any:
        return torch.from_numpy(self._model.predict(pairs))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(scope="session")
def hf_runner() -> type[HfRunner]:
    return HfRunner


@dataclass
class EmbedModelInfo:
    """Facts that a test states of a model."""

    name: str
    is_matryoshka: bool = False
    matryoshka_dimensions: list[int] | None = None


def matryoshka_fy(rows: Any, dimensions: int) -> Any:
    return F.normalize(torch.as_tensor(rows)[..., :dimensions], dim=1)


def check_embeddings_close(*, embeddings_0_lst: Any, embeddings_1_lst: Any, tol: float = 1e-3, **_: Any) -> None:
    assert len(embeddings_0_lst) == len(embeddings_1_lst)
    for first, second in zip(embeddings_0_lst, embeddings_1_lst, strict=True):
        pair = [torch.as_tensor(each, dtype=torch.float32).flatten() for each in (first, second)]
        assert F.cosine_similarity(*pair, dim=0) >= 1 - tol
