"""Chat templates of rerankers.

Reads a Jinja template with the roles `query` and `document` into a `Template`. Jinja's sandbox runs it once, with marks in
place of the texts. A template that does more than insert query and document is refused. No request reaches Jinja.

Sources: sentence_transformers/base/modality.py (`pair_to_messages`, `prepend_prompt_to_messages`; 6.2), and
transformers/utils/chat_template_utils.py (5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from whimbrel.checkpoint.json_file import JsonFile, find_file
from whimbrel.errors import CheckpointError, SetupError
from whimbrel.types.template import Template, fields, fill, from_examples

_FILE: Final = "chat_template.jinja"
_MAX_CHARACTERS: Final = 2**16
_MARKS: Final = {"query": "\ue000query\ue001", "document": "\ue000document\ue001", "instruction": "\ue000instruction\ue001"}
"""Placeholders made of private-use characters."""
_ASCII: Final = "".join(map(chr, range(1, 128)))
_PROBES: Final = (
    ("a b", "c d"),
    (" q\n", "\n\n d "),
    ("", "d"),
    ("q", ""),
    (_ASCII, _ASCII[::-1]),
    ("1", "\u00e9\u2028 \U0001f600" * 900),
)

_Render: TypeAlias = Callable[[str, str, str | None], str]
"""(query, document, instruction or None) -> text."""


def read_chat_template(root: Path, tokenizer: JsonFile, *, structured: bool, variables: Mapping[str, Any]) -> Template:
    """Return the template of the checkpoint in `root`. Raises CheckpointError. `structured`: messages hold lists of parts."""
    file, source = _source(root, tokenizer)
    render = _renderer(file, source, structured, {**_special_tokens(tokenizer), **variables})
    plain = _text(file, render, None)
    strips = next((strips for strips in (False, True) if _holds(render, plain, None, strips=strips)), None)
    if strips is None:
        raise CheckpointError("does more with query and document than to put them somewhere.", file=file, key="chat_template")
    try:
        text = _text(file, render, _MARKS["instruction"])
    except CheckpointError:
        text = plain  # without a place for an instruction
    if "instruction" not in fields(text):
        return Template((plain,), strip_inputs=strips)
    if not all(_holds(render, text, instruction, strips=strips) for instruction in ("i", _ASCII)):
        raise CheckpointError("does more with a system message than to put it somewhere.", file=file, key="chat_template")
    return Template((plain,), (text,), strip_inputs=strips)


def _source(root: Path, tokenizer: JsonFile) -> tuple[str, str]:
    """Return (file, template). A template file overrides tokenizer_config.json."""
    if (root / _FILE).exists():
        file, source = _FILE, find_file(root, _FILE).read_text(encoding="utf-8")
    else:
        file, source = tokenizer.name, tokenizer.get("chat_template", str)
    if len(source) > _MAX_CHARACTERS:
        message = f"has {len(source):,} characters; the limit is {_MAX_CHARACTERS:,}."
        raise CheckpointError(message, file=file, key="chat_template")
    return file, source


def _renderer(file: str, source: str, structured: bool, variables: Mapping[str, Any]) -> _Render:
    try:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise SetupError("reading a chat template needs jinja2.", hint="pip install 'whimbrel[serve]'") from None

    def content(text: str) -> Any:
        return [{"type": "text", "text": text}] if structured else text

    def render(query: str, document: str, instruction: str | None) -> str:
        pair = [{"role": "query", "content": content(query)}, {"role": "document", "content": content(document)}]
        system = [] if instruction is None else [{"role": "system", "content": content(instruction)}]
        try:
            return compiled.render(messages=system + pair, tools=None, documents=None, **variables)
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise _render_error(file, error) from None

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    try:
        compiled = environment.from_string(source)
    except TemplateError as error:
        raise _render_error(file, error) from None
    return render


def _render_error(file: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"does not render a query and a document ({error}).", file=file, key="chat_template")


def _special_tokens(tokenizer: JsonFile) -> dict[str, str]:
    tokens = dict[str, str]()
    for key, value in tokenizer.data.items():
        content: object = cast(dict[str, Any], value).get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


def _text(file: str, render: _Render, instruction: str | None) -> str:
    text = from_examples(render(_MARKS["query"], _MARKS["document"], instruction), _MARKS)
    if missing := {"query", "document"} - set(fields(text)):
        raise CheckpointError(f"has no place for the {min(missing)}.", file=file, key="chat_template")
    return text


def _holds(render: _Render, text: str, instruction: str | None, *, strips: bool) -> bool:
    """Return whether the format string renders the same text as the template."""
    template = Template((text,), strip_inputs=strips)
    return all(
        fill(text, query=parts[0], document=parts[1], instruction=instruction or "") == render(query, document, instruction)
        for query, document in _PROBES
        for parts in [template.parts(query, document)]
    )
