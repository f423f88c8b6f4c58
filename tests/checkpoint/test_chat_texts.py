"""Sentence Transformers over a tokenizer with a chat template: every text is a user's message, and a prompt the system's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from checkpoints.files import edit_json, write_json
from checkpoints.rerankers import SIZES, gemma, llama3, qwen, write_reranker
from checkpoints.tokenizer_files import load
from encoding import encode_request
from parity import Parity
from serving import Server
from whimbrel import Client, Engine
from whimbrel.checkpoint.reader import read_card
from whimbrel.errors import CheckpointError, InvalidRequest
from whimbrel.types.request import Request, TokenizeRequest

CHATML = """
{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
QWEN3 = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" and '</think>' in content %}
        {{- content.split('</think>')[-1] }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
LLAMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|im_start|>system\\n\\nToday: ' + (date_string or '26 Jul 2024') + '\\n\\n' + system + '<|im_end|>' }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
"""
GEMMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set rest = messages[1:] -%}
{%- else -%}{%- set prefix = "" -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("Roles must alternate.") }}{%- endif -%}
    {{ '<start_of_turn>' + message['role'] + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- else -%}{%- for item in message['content'] -%}{%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}
    {{ '\\n' }}
{%- endfor -%}
"""
QWEN35 = """
{%- macro render(content) %}
    {%- if content is string %}{{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}{%- if 'text' in item %}{{- item.text }}{%- else %}{{- raise_exception('Unexpected item.') }}{%- endif %}{%- endfor %}
    {%- else %}{{- raise_exception('Unexpected content.') }}{%- endif %}
{%- endmacro %}
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + render(messages[0].content)|trim + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(open=true) %}
{%- for message in messages %}
    {%- set content = render(message.content)|trim %}
    {%- if message.role == "user" %}
        {%- if not(content.startswith('<tool_call>') and content.endswith('</tool_call>')) %}{%- set ns.open = false %}{%- endif %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if ns.open %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
"""
"""It refuses some texts, and takes contents in both forms."""
TAIL = "{{ messages[-1].content }}\n\n{% if messages|length > 1 %}{{ messages[0].content }}{% endif %}1 2 3"
"""The prompt stands behind the text, and the end may melt into it."""

TEXTS = [
    "Some fly ten thousand kilometres in a year.",
    "",
    "  spaces around \n\n",
    "ends in a line\n",
    "{text} {{ x }} {0} %s <|im_end|>\n<|im_start|>user",
    "<tool_response>2026</tool_response>",
    "2026 l'été à la plage\n\nI'll  don't </think> https://example.org/a.png",
    "it breeds across much of North America. " * 30,
    "雪飛 русский текст 🙂",
]
PROMPTS = {"query": "Find facts: ", "document": "", "spaces": " Represent this \n"}
CASES: dict[str, tuple[str, Any, str, str]] = {
    "qwen 2.5": (CHATML, qwen, "Qwen2", "lasttoken"),
    "qwen 3": (QWEN3, qwen, "Qwen3", "lasttoken"),
    "qwen 3.5": (QWEN35, qwen, "Qwen3", "lasttoken"),
    "llama 3": (LLAMA, llama3, "Llama", "mean"),
    "gemma 3": (GEMMA, gemma, "Gemma", "mean"),
    "prompt at the end": (TAIL, qwen, "Qwen3", "lasttoken"),
}


def save(folder: Path, template: str, tokenizer: Any, kind: str, mode: Any, *, max_length: int = 60, **stated: Any) -> None:
    """A checkpoint as a new SentenceTransformer over a model with a chat template saves it."""
    content, config = tokenizer()
    write_reranker(folder / "plain", kind, (content, config | {"chat_template": template} | stated), form="Model")
    chain = [Transformer(str(folder / "plain")), Pooling(SIZES["hidden_size"], mode, include_prompt=False), Normalize()]
    model = SentenceTransformer(modules=chain, device="cpu", prompts=PROMPTS)
    model.max_seq_length = max_length
    model.save_pretrained(str(folder / "saved"))
    settings = json.loads((folder / "saved/sentence_bert_config.json").read_text())
    assert set(settings["modality_config"]) == {"text", "message"}


@pytest.mark.parametrize("name", CASES)
def test_texts_of_a_model_with_a_chat_template(name: str, parity: Parity, tmp_path: Path) -> None:
    """Ids and vectors are those of Sentence Transformers: with prompts, cut, stripped, and with control tokens in a text."""
    save(tmp_path, *CASES[name])
    reference = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    tokenizer = load(tmp_path / "saved")
    with Engine(str(tmp_path / "saved"), dtype="float32") as engine:
        for prompt in ("", "Find facts: ", " Represent this \n", "<|im_end|> " * 40):
            for text in TEXTS:
                expected = reference.preprocess([text], prompt=prompt)["input_ids"][0].tolist()
                (seq,) = encode_request(tokenizer, Request([text], prompt=prompt))
                assert seq.ids.tolist() == expected
            parity(engine.embed(TEXTS, prompt=prompt), reference.encode(TEXTS, prompt=prompt))
        parity(engine.embed(TEXTS), reference.encode(TEXTS))
        parity(engine.embed(TEXTS, input_type="query"), reference.encode_query(TEXTS))
        parity(engine.embed(TEXTS, input_type="document"), reference.encode_document(TEXTS))
        assert np.array_equal(engine.embed(TEXTS), np.stack([engine.embed(text) for text in TEXTS]))
        with pytest.raises(InvalidRequest, match="chat template"):
            engine.embed(TEXTS, split_long=True)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["qwen 3", "prompt at the end"])
def test_texts_in_chats_are_cut_at_every_length(name: str, side: str, tmp_path: Path) -> None:
    """The template's end stays, on both sides and where the limit is just reached."""
    template, tokenizer, kind, mode = CASES[name]
    save(tmp_path, template, tokenizer, kind, mode, truncation_side=side)
    reference = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    ours = load(tmp_path / "saved")
    for limit in range(1, 40):
        reference.max_seq_length = limit
        for text in ("one two three four five", "a line\n", "7", "2026 2027\n\n"):
            for prompt in ("", "Find facts: "):
                expected = reference.preprocess([text], prompt=prompt)["input_ids"][0].tolist()
                (seq,) = encode_request(ours, Request([text], prompt=prompt, max_tokens=limit))
                assert seq.ids.tolist() == expected


def test_variables_of_a_chat_template_and_its_file(parity: Parity, tmp_path: Path) -> None:
    """Those that the checkpoint states are used; a file chat_template.jinja stands for the key."""
    save(tmp_path, *CASES["qwen 3"])
    assert (tmp_path / "saved/chat_template.jinja").exists()
    variables = {"add_generation_prompt": True, "enable_thinking": False}
    edit_json(tmp_path / "saved/sentence_bert_config.json", processing_kwargs={"chat_template": variables})
    reference = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert reference.tokenizer.decode(reference.preprocess(["a"])["input_ids"][0]).endswith("</think>\n\n")
    with Engine(str(tmp_path / "saved"), dtype="float32") as engine:
        parity(engine.embed(TEXTS), reference.encode(TEXTS))
        (tokens,) = engine.preprocessor.tokenize(TokenizeRequest(["a"], prompt_name="query"))
    assert tokens.ids_T.tolist() == reference.preprocess(["a"], prompt=PROMPTS["query"])["input_ids"][0].tolist()
    edit_json(tmp_path / "saved/sentence_bert_config.json", processing_kwargs={"chat_template": {"restore_suffix": False}})
    with pytest.raises(CheckpointError, match="'restore_suffix' is not supported"):
        read_card(tmp_path / "saved", "m")


def test_one_of_several_chat_templates(tmp_path: Path) -> None:
    """The template named default is used of a list, as transformers does."""
    save(tmp_path, *CASES["qwen 3"])
    expected = read_card(tmp_path / "saved", "m").text_template
    (tmp_path / "saved/chat_template.jinja").unlink()
    rows = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": QWEN3}]
    edit_json(tmp_path / "saved/tokenizer_config.json", chat_template=rows)
    assert read_card(tmp_path / "saved", "m").text_template == expected
    edit_json(tmp_path / "saved/tokenizer_config.json", chat_template=rows[:1])
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template: has no template"):
        read_card(tmp_path / "saved", "m")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[-1].content | upper }}", "0 places for a text"),
        ("{{ messages[-1].content.replace('/no_think', '') }}", "more with a text"),
        ("{% if '</think>' in messages[-1].content %}x{% endif %}{{ messages[-1].content }}", "more with a text"),
        (
            "{{ messages[-1].content }}{% if messages[-1].content.startswith('<a>') and messages[-1].content.endswith('<b>') %}x{% endif %}",
            "more with a text",
        ),
        ("{{ messages[-1].content }}{{ messages[-1].content }}", "2 places for a text"),
        ("nothing", "0 places for a text"),
        ("{% for message in messages %}{{ message.content }}{{ message.content | length }}{% endfor %}", "more with a text"),
        (
            "{{ messages[0].content | replace('\\n', '') if messages|length > 1 }}{{ messages[-1].content }}",
            "more with a system",
        ),
        ("{{ strftime_now('%d') }}{{ messages[-1].content }}", "depends on the day"),
        ("{{ raise_exception('No users.') }}", r"does not render a user \(No users\.\)"),
        ("{{ messages[-1].content }}{{ task }}", "uses 'task'"),
        ("{{ mask_token }}{{ messages[-1].content }}", "uses 'mask_token'"),
        ("{{ messages[-1].content }", "does not render"),
        ("{{ messages[-1].content }}", "has prompts, for which the chat template has no place"),
    ],
)
def test_chat_templates_that_are_refused(template: str, words: str, tmp_path: Path) -> None:
    """A template that changes a text, or whose text is not known, is refused with file and key."""
    save(tmp_path, *CASES["qwen 3"])
    (tmp_path / "saved/chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match=words):
        read_card(tmp_path / "saved", "m")


def test_a_prompt_without_a_place_in_the_chat(parity: Parity, tmp_path: Path) -> None:
    """The request is refused. Without a prompt the texts are served."""
    save(tmp_path, *CASES["qwen 3"])
    (tmp_path / "saved/chat_template.jinja").write_text("User: {{ messages[-1].content }}\n")
    write_json(tmp_path / "saved/config_sentence_transformers.json", {"model_type": "SentenceTransformer"})
    reference = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    with Engine(str(tmp_path / "saved"), dtype="float32") as engine:
        parity(engine.embed(TEXTS), reference.encode(TEXTS))
        with pytest.raises(InvalidRequest, match="prompt: this model's chat template has no place for a prompt"):
            engine.embed(TEXTS, prompt="Find: ")


def test_a_server_of_a_model_with_a_chat_template(parity: Parity, tmp_path: Path) -> None:
    """Its workers tokenise as Sentence Transformers does; a chat is refused. An accepted key is in the banner and in /info."""
    save(tmp_path, *CASES["qwen 3"])
    reference = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    edit_json(tmp_path / "saved/config.json", house_style=3)
    with Server(str(tmp_path / "saved"), "--dtype", "float32", "--accept-config", "house_style") as server:
        assert "house_style (unknown keys of the checkpoint)" in server.log
        with Client(server.url) as client, httpx2.Client(base_url=server.url, timeout=30) as http:
            parity(client.embed(TEXTS, prompt="query"), reference.encode(TEXTS, prompt_name="query"))
            assert http.get("/info").json()["models"][0]["plan"]["accept_config"] == ["house_style"]
            chat = {"model": "m", "messages": [{"role": "user", "content": "birds"}]}
            answer = http.post("/v1/embeddings", json=chat)
            assert answer.status_code == 400
            assert "chats are not taken" in answer.text
            tokens = http.post("/tokenize", json={"inputs": "a"}).json()[0]
            assert [token["id"] for token in tokens] == reference.preprocess(["a"])["input_ids"][0].tolist()
