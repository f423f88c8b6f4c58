"""Chat templates of tokenizers.

Reads a Jinja template into a `Template` of a pair (roles `query` and `document`), or into a `TextTemplate` (role `user`).
Jinja's sandbox runs it at load, with marks and trying texts in place of the texts. A template that does more than put them
somewhere is refused. No request reaches Jinja.

Sources: sentence_transformers/base/modality.py (`pair_to_messages`, `to_message`, `prepend_prompt_to_messages`; 6.2), and
transformers/utils/chat_template_utils.py (5.23).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from whimbrel.checkpoint.json_file import JSON, JsonFile, find_file
from whimbrel.errors import CheckpointError, SetupError
from whimbrel.types.template import Template, TextTemplate, fields, fill, from_examples

_FILE: Final = "chat_template.jinja"
_MAX_CHARACTERS: Final = 2**16
_MARKS: Final = {"query": "\ue000query\ue001", "document": "\ue000document\ue001", "instruction": "\ue000instruction\ue001"}
"""Placeholders made of private-use characters."""
_ASCII: Final = "".join(map(chr, range(1, 128)))
_LONG: Final = "\u00e9\u2028 \U0001f600" * 900
_PROBES: Final = (("a b", "c d"), (" q\n", "\n\n d "), ("", "d"), ("q", ""), (_ASCII, _ASCII[::-1]), ("1", _LONG))
_TEXTS: Final = ("a b", " q\n", "", _ASCII, _LONG)
_PROMPTS: Final = ("i", "\n i ", _ASCII)
_MAX_WORDS: Final = 24
"""Words of a template that it may compare a text with. All pairs of them are tried."""

_Messages: TypeAlias = Callable[[Sequence[tuple[str, str]]], str]
"""Messages, each a role and a content -> text."""
_Render: TypeAlias = Callable[[str, str, str | None], str]
"""(query, document, instruction or None) -> text."""


def read_chat_template(root: Path, tokenizer: JsonFile, *, structured: bool, variables: Mapping[str, Any]) -> Template:
    """Return the template of the checkpoint in `root`. `structured`: messages hold lists of parts. Raises CheckpointError."""
    file, render_messages, _ = _renderer(root, tokenizer, structured, variables)

    def render(query: str, document: str, instruction: str | None) -> str:
        system = [] if instruction is None else [("system", instruction)]
        return render_messages([*system, ("query", query), ("document", document)])

    plain = _text(file, render, None)
    strips = not _holds(render, plain, None, strips=False)
    if strips and not _holds(render, plain, None, strips=True):
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


def read_text_template(root: Path, tokenizer: JsonFile, *, structured: bool, variables: Mapping[str, Any]) -> TextTemplate:
    """Return the template of one text, a user's message, and of a prompt, a system message. Raises CheckpointError."""
    file, render, words = _renderer(root, tokenizer, structured, variables)

    def rendered(text: str, prompt: str | None) -> str:
        return render([*([] if prompt is None else [("system", prompt)]), ("user", text)])

    def is_taken(text: str) -> bool:
        try:
            return bool(rendered(text, None))
        except CheckpointError:  # the template gives no vector of this text
            return False

    tried = (*words, *("".join(pair) for pair in product(words, (*words, "x"))), *("x" + word for word in words))
    texts = [*_TEXTS, *filter(is_taken, tried)]
    plain = _around(file, rendered(_MARKS["document"], None))
    expected = [(text, rendered(text, None)) for text in texts]
    for alone in (TextTemplate(plain), TextTemplate(plain, strip_text=True)):
        if all(alone.wrap(text, "") == whole for text, whole in expected):
            break
    else:
        raise CheckpointError("does more with a text than to put it somewhere.", file=file, key="chat_template")
    try:
        prompted = _around(file, rendered(_MARKS["document"], _MARKS["instruction"]))
    except CheckpointError:
        return alone  # without a place for a prompt
    if not any("instruction" in fields(part) for part in prompted):
        return alone
    for strips_prompt in (False, True):
        template = replace(alone, prompted=prompted, strip_prompt=strips_prompt)
        if all(template.wrap(text, prompt) == rendered(text, prompt) for prompt in _PROMPTS for text in texts):
            return template
    raise CheckpointError("does more with a system message than to put it somewhere.", file=file, key="chat_template")


def _around(file: str, rendered: str) -> tuple[str, str]:
    """Return the format strings before and after the mark of the text."""
    parts = from_examples(rendered, _MARKS).split("{document}")
    if len(parts) != 2:
        raise CheckpointError(f"has {len(parts) - 1} places for a text; it must have one.", file=file, key="chat_template")
    return parts[0], parts[1]


def _source(root: Path, tokenizer: JsonFile) -> tuple[str, str]:
    """Return (file, template). A template file overrides tokenizer_config.json."""
    has_file = (root / _FILE).exists()
    file = _FILE if has_file else tokenizer.name
    source = find_file(root, _FILE).read_text(encoding="utf-8") if has_file else _stated_template(tokenizer)
    if len(source) > _MAX_CHARACTERS:
        message = f"has {len(source):,} characters; the limit is {_MAX_CHARACTERS:,}."
        raise CheckpointError(message, file=file, key="chat_template")
    return file, source


def _stated_template(tokenizer: JsonFile) -> str:
    """Return the template of tokenizer_config.json: the only one, or the one of several that is called default."""
    rows: object = tokenizer.data.get("chat_template")
    if not isinstance(rows, list):
        return tokenizer.get("chat_template", str)
    for row in cast(list[object], rows):
        named = JsonFile(tokenizer.name, row)
        if named.data.get("name") == "default":
            return named.get("template", str)
    raise tokenizer.error("has no template that is called default.", "chat_template")


def _renderer(
    root: Path, tokenizer: JsonFile, structured: bool, variables: Mapping[str, Any]
) -> tuple[str, _Messages, list[str]]:
    """Return (file, the template as a function of messages, words with which it may compare their contents)."""
    try:
        from jinja2 import TemplateError, meta, nodes
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise SetupError("reading a chat template needs jinja2.", hint="pip install 'whimbrel[serve]'") from None

    file, source = _source(root, tokenizer)

    def refuse(message: object) -> str:
        raise TemplateError(str(message))

    def refuse_date(_: object) -> str:
        raise CheckpointError("depends on the day, and so would the vectors.", file=file, key="chat_template")

    functions = {"raise_exception": refuse, "strftime_now": refuse_date}
    values: dict[str, Any] = {**functions, **_special_tokens(tokenizer), **variables}

    def message(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if structured else text}

    def render(messages: Sequence[tuple[str, str]]) -> str:
        try:
            return compiled.render(messages=[message(*each) for each in messages], tools=None, documents=None, **values)
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            roles = " and ".join(f"a {role}" for role, _ in messages)
            raise CheckpointError(f"does not render {roles} ({error}).", file=file, key="chat_template") from None

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    try:
        tree = environment.parse(source)
        compiled = environment.from_string(source)
    except TemplateError as error:
        raise CheckpointError(f"does not render ({error}).", file=file, key="chat_template") from None
    for name in sorted(meta.find_undeclared_variables(tree)):
        if name == "task" or (name.endswith("_token") and name not in {*values, *tokenizer.data}):
            raise CheckpointError(f"uses {name!r}, which is not known here.", file=file, key="chat_template")
    constants = [const.value for each in tree.find_all((nodes.Compare, nodes.Call)) for const in each.find_all(nodes.Const)]
    words = dict.fromkeys(value for value in constants if isinstance(value, str) and value)
    return file, render, list(words)[:_MAX_WORDS]


def _special_tokens(tokenizer: JsonFile) -> dict[str, str]:
    stated = ((key, value) for key, value in tokenizer.data.items() if key.endswith("_token"))
    contents = ((key, cast(JSON, value).get("content") if isinstance(value, dict) else value) for key, value in stated)
    return {key: content for key, content in contents if isinstance(content, str)}


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
