"""Settings files of Sentence Transformers.

Reads modules.json, config_sentence_transformers.json (whole model) and sentence_bert_config.json (its Transformer). A Router
sends queries and documents through different modules. It stands first, or after a model that its routes share, and
`checkpoint/reader.py` reads a route like any list of modules.

Sources: sentence_transformers/base/model.py and base/modules/{transformer,router}.py (6.2), both layouts, up to 5.3 and since
5.4; of INSTRUCTOR, InstructorEmbedding/instructor.py (1.0.1) and sentence_transformers/sentence_transformer/model.py.
"""

import ast
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from whimbrel.checkpoint.json_file import Fixed, JsonFile, find_file, read_json
from whimbrel.errors import CheckpointError
from whimbrel.types.card import Encoder
from whimbrel.types.request import InputType

MODULES, SENTENCE = "modules.json", "config_sentence_transformers.json"

Rows: TypeAlias = list[tuple[str, str]]
"""(kind, path) of modules in their order."""


def kinds_of(package: str, classes: str) -> dict[str, str]:
    """Return the kind of module for each class of Sentence Transformers: the class's own name."""
    return {f"sentence_transformers.{package}.{name}": name.rpartition(".")[2] for name in classes.split()}


WITH_TASKS: Final = "custom_st.Transformer"
"""The Transformer of jina-embeddings-v3 and v5, which chooses an adapter by the task."""
_INSTRUCTOR: Final = "InstructorEmbedding"
"""Package with a Transformer and a Pooling of its own. Old files name only the module of a class."""
_OWN: Final = ("Transformer", "Pooling")
OWN_LENGTH: Final = 512
"""Limit in tokens per text of the package's classes, whatever the files say."""
_INSTRUCTORS: Final = frozenset(f"instructor-{size}" for size in ("base", "large", "xl"))
"""Models of hkunlp whose files do not say that prompts are not pooled; Sentence Transformers knows these ids."""
KINDS: Final[Mapping[str, str]] = {
    "sentence_transformers.models.Asym": "Router",
    **kinds_of("models", "Router StaticEmbedding StaticEmbedding.StaticEmbedding Transformer"),
    **kinds_of("models", "Pooling Dense LayerNorm Normalize Dropout"),
    **kinds_of("base.modules", "router.Router transformer.Transformer dense.Dense normalize.Normalize"),
    **kinds_of("sentence_transformer.modules", "static_embedding.StaticEmbedding pooling.Pooling layer_norm.LayerNorm"),
    **kinds_of("sentence_transformer.modules", "normalize.Normalize dropout.Dropout"),
    **kinds_of("sparse_encoder.models", "MLMTransformer SpladePooling SparseAutoEncoder SparseStaticEmbedding"),
    **kinds_of("sparse_encoder.modules", "mlm_transformer.MLMTransformer splade_pooling.SpladePooling"),
    **kinds_of("sparse_encoder.modules", "sparse_auto_encoder.SparseAutoEncoder sparse_static_embedding.SparseStaticEmbedding"),
    WITH_TASKS: WITH_TASKS,
    **{f"{_INSTRUCTOR}.{prefix}_{kind}": kind for kind in _OWN for prefix in ("INSTRUCTOR", "instructor.INSTRUCTOR")},
}
"""Class -> kind of module, without those of late interaction."""


def stated_classes(folder: Path) -> list[str]:
    """Return the classes that modules.json names. Empty without the file."""
    values: object = read_json(folder, MODULES) if has_modules(folder) else []
    rows = cast(list[object], values) if isinstance(values, list) else []
    types = [cast(dict[str, object], row).get("type") for row in rows if isinstance(row, dict)]
    return [kind for kind in types if isinstance(kind, str)]


def has_own_classes(folder: Path) -> bool:
    """Return whether modules.json names classes of INSTRUCTOR's own package."""
    return any(kind.partition(".")[0] == _INSTRUCTOR for kind in stated_classes(folder))


def is_instructor(folder: Path, name: str, rows: Rows, encoder: Encoder) -> bool:
    """Return whether prompts are INSTRUCTOR's. Raises CheckpointError if neither modules.json nor the name nor a key tells."""
    if has_own_classes(folder):
        return True
    last = name.rpartition("/")[2].lower()
    pooling = next((path for kind, path in rows if kind == "Pooling"), None)
    if "instructor" not in last or pooling is None or encoder.family not in ("t5", "t5_gated"):
        return False
    stated = JsonFile.read(folder, f"{pooling}/config.json")
    if stated.data.get("include_prompt") is not None or last in _INSTRUCTORS:
        return stated.get("include_prompt", bool, False) is False
    message = f"is missing. {name} seems to be an INSTRUCTOR, whose prompts are not pooled."
    hint = f"add the key to {pooling}/config.json: false for an INSTRUCTOR, true for another model; or see {MODULES}"
    raise stated.error(message, "include_prompt", hint)


def has_modules(folder: Path) -> bool:
    return (folder / MODULES).exists()


def read_modules(folder: Path, kinds: Mapping[str, str]) -> Rows:
    """Return the modules of modules.json. `kinds`: supported classes."""
    values = read_json(folder, MODULES)
    if not isinstance(values, list):
        raise CheckpointError("must be a list of objects.", file=MODULES)
    own = [{f"{_INSTRUCTOR}.instructor": kind, **kinds} for kind in _OWN]
    rows = [JsonFile(MODULES, value) for value in cast(list[object], values)]
    return [_read_row(folder, row, own[i] if i < len(own) else kinds) for i, row in enumerate(rows)]


def _read_row(folder: Path, row: JsonFile, kinds: Mapping[str, str]) -> tuple[str, str]:
    row.reject_unknown_keys({"idx", "name", "path", "type", "kwargs"})
    arguments = (["task"], ["task", "truncate_dim"]) if row.data.get("type") == WITH_TASKS else ()
    row.require_values({"kwargs": (*arguments, [], {}, None)})
    path = _path(folder, "", row, "path", row.get("path", str))
    return _kind(row, "type", row.data.get("type"), kinds), path


def _kind(file: JsonFile, key: str, value: object, kinds: Mapping[str, str]) -> str:
    """Return the kind of a module whose class is `value`. Raises CheckpointError, which names kinds, not all classes."""
    if isinstance(value, str) and value in kinds:
        return kinds[value]
    raise file.error(f"{value!r:.120} is not supported; supported: {', '.join(dict.fromkeys(kinds.values()))}.", key)


def _path(folder: Path, parent: str, file: JsonFile, key: str, name: str) -> str:
    """Return the path of the module `name` in `folder`. Raises CheckpointError if it leads out of the folder."""
    if name.startswith(("/", "\\")) or ".." in Path(name).parts:
        raise file.error(f"{name!r} leads out of the checkpoint's folder.", key)
    path = f"{parent}/{name}" if parent else name
    find_file(folder, path)
    return path


_TRANSFORMER_FILES: Final = [
    f"sentence_{model}_config.json" for model in "bert roberta distilbert camembert albert xlm-roberta xlnet".split()
]
_METHOD: Final = {"method": "forward", "method_output_name": "last_hidden_state"}
_FEATURES: Final[Fixed] = {
    "transformer_task": ("feature-extraction", None),
    # with "message" beside it every text goes through the chat template: see WITH_CHAT
    "modality_config": ({"text": _METHOD}, None),
    "module_output_name": ("token_embeddings", None),
    "processing_kwargs": ({}, None),
    **dict.fromkeys(("query_length", "document_length", "query_expansion"), (None,)),
}
"""Supported settings of a Transformer that gives hidden states."""
_CHATS: Final = [{"text": _METHOD, "message": {**_METHOD, "format": kind}} for kind in ("flat", "structured")]
WITH_CHAT: Final[Fixed] = {"modality_config": (*_FEATURES["modality_config"], *_CHATS)}
"""Supported settings of a Transformer that may put each text into the chat template, as a message of a user."""
_NO_VARIABLES: Final = """
    padding truncation max_length return_tensors restore_suffix tokenize messages tools documents chat_template task
    continue_final_message return_assistant_tokens_mask return_dict tokenizer_kwargs
""".split()
"""Arguments in place of variables of a chat template."""
_ARGUMENTS: Final = ("model_args", "config_args", "tokenizer_args", "model_kwargs", "config_kwargs", "processor_kwargs")
"""Keys with arguments for loading a model's parts in transformers."""
_INERT_ARGUMENTS: Final = frozenset({"attn_implementation", "dtype", "torch_dtype", "trust_remote_code"})
"""Arguments that do not matter: Whimbrel runs no custom code, and the user chooses dtype and kernels."""


def read_transformer(folder: Path, *, used: Collection[str] = (), stated: Fixed | None = None) -> JsonFile:
    """Return the settings in `folder`, checked except for the keys `used`. `stated`: values if it gives no hidden states."""
    file = next((name for name in _TRANSFORMER_FILES if (folder / name).exists()), _TRANSFORMER_FILES[0])
    config = JsonFile.read_optional(folder, file)
    fixed = {key: values for key, values in {**_FEATURES, **(stated or {})}.items() if key not in used}
    config.reject_unknown_keys(fixed, used, _ARGUMENTS, {"max_seq_length", "do_lower_case", "unpad_inputs"})
    config.require_values(fixed)
    for key in (key for key in _ARGUMENTS if key not in used):
        config.section(key).reject_unknown_keys(_INERT_ARGUMENTS)
    return config


def read_chat_format(transformer: JsonFile) -> tuple[bool, Mapping[str, Any]] | None:
    """Return whether messages hold lists of parts, and the variables of the chat template. None without a chat template."""
    modalities = cast(dict[str, Any], transformer.get("modality_config", dict, {}))
    processing = JsonFile(transformer.name, transformer.get("processing_kwargs", dict, {}))
    processing.reject_unknown_keys({"chat_template"})
    variables = cast(dict[str, Any], processing.get("chat_template", dict, {}))
    for key in variables:
        if key in _NO_VARIABLES:
            raise transformer.error(f"{key!r} is not supported.", "processing_kwargs")
    if "message" not in modalities:
        return None
    return modalities["message"]["format"] == "structured", variables


def read_max_length(encoder: Encoder, transformer: JsonFile, tokenizer: JsonFile) -> int:
    """Return the maximum tokens per text by Sentence Transformers' rule, capped at the model's positions."""
    key = "model_max_length" if "model_max_length" in tokenizer.data else "max_len"
    stated = transformer.positive("max_seq_length", 0) or tokenizer.get(key, float, float(encoder.max_positions))
    if stated < 1:
        raise tokenizer.error(f"must be positive, is {stated}.", key)
    return int(min(stated, encoder.max_positions))


KNOWN_SENTENCE: Final = (
    "__version__ default_prompt_name model_type prompts requirements similarity_fn_name truncate_dim".split()
)
"""Keys of config_sentence_transformers.json for all kinds of models."""


def read_sentence(folder: Path, kind: str, own: Collection[str] = ()) -> JsonFile:
    """Return the checked settings of a whole model of this kind. `own`: keys that only this kind has."""
    config = JsonFile.read_optional(folder, SENTENCE)
    config.reject_unknown_keys(KNOWN_SENTENCE, {"max_active_dims"}, own)
    config.require_values({"model_type": (kind, None)})
    if kind != "SentenceTransformer":
        config.require_values({"truncate_dim": (None,)})
    if kind != "SparseEncoder":
        config.require_values({"max_active_dims": (None,)})
    read_prompts(config)
    config.require_values({"similarity_fn_name": ("cosine", "dot", "euclidean", "manhattan", None)})
    return config


def model_kind(rows: Rows) -> str:
    """Return the model_type of a model of these modules that gives vectors."""
    is_sparse = rows[-1][0] in ("SpladePooling", "SparseAutoEncoder", "SparseStaticEmbedding")
    return "SparseEncoder" if is_sparse else "SentenceTransformer"


def read_prompts(config: JsonFile) -> tuple[dict[str, str], str | None]:
    """Return (prompts by name, name of the default) of config_sentence_transformers.json."""
    prompts: dict[str, str] = {}
    for name, text in cast(dict[str, object], config.get("prompts", dict, {})).items():
        if not isinstance(text, str):
            raise config.error(f"prompt {name!r} must be a string, is {text!r}.", "prompts")
        prompts[name] = text
    default = config.get("default_prompt_name", str, "")
    if default and default not in prompts:
        raise config.error(f"{default!r} is not among the prompts {list(prompts)}.", "default_prompt_name")
    return prompts, config.data.get("default_prompt_name")


_ROUTER_FILES: Final = ("router_config.json", "config.json")
_TASKS: Final[tuple[InputType | None, ...]] = (None, "query", "document")


def read_router(folder: Path, path: str) -> tuple[dict[str, Rows], dict[InputType | None, str]]:
    """Return (route -> its modules; input type, or None for texts without one -> route). Raises CheckpointError."""
    name = next((name for name in _ROUTER_FILES if (folder / path / name).exists()), _ROUTER_FILES[0])
    config = JsonFile.read(folder, f"{path}/{name}" if path else name)
    config.reject_unknown_keys({"types", "structure", "parameters"})
    types = cast(dict[str, object], config.get("types", dict))
    kinds = {module: _kind(config, "types", kind, KINDS) for module, kind in types.items()}
    rows = dict[str, Rows]()
    for route, names in cast(dict[str, object], config.get("structure", dict)).items():
        if not isinstance(names, list) or any(name not in kinds for name in cast(list[object], names)):
            raise config.error(f"{route} must be a list of modules that have a type, is {names!r:.80}.", "structure")
        rows[route] = [(kinds[name], _path(folder, path, config, "structure", name)) for name in cast(list[str], names)]
    if not rows:
        raise config.error("names no route.", "structure")
    route_of = _route_of(JsonFile(config.name, config.get("parameters", dict, {})), list(rows))
    if unreachable := rows.keys() - set(route_of.values()):
        raise config.error(f"no query and no document takes the route {min(unreachable)!r}.", "structure")
    return rows, route_of


def _route_of(parameters: JsonFile, routes: list[str]) -> dict[InputType | None, str]:
    """Return the route of each input type, in the Router's order: mapping, name of task or modality, default."""
    parameters.reject_unknown_keys({"allow_empty_key", "default_route", "route_mappings"})
    mapped = _mappings(parameters, routes)
    default = parameters.data.get("default_route")
    if default is None and parameters.get("allow_empty_key", bool, True):
        default = routes[0]
    if default is not None and default not in routes:
        raise parameters.error(f"{default!r} is no route; routes: {', '.join(routes)}.", "default_route")
    route_of = dict[InputType | None, str]()
    for task in _TASKS:
        keys = ((task, "text"), (task, None), (None, "text"), (None, None))
        choices = [mapped[key] for key in keys if key in mapped]
        choices += [route for route in (task, "text") if route in routes]
        if task is None and isinstance(default, str):
            choices.append(default)
        if choices:
            route_of[task] = choices[0]
    return route_of


def _mappings(parameters: JsonFile, routes: list[str]) -> dict[tuple[object, object], str]:
    """Return the mapping of (task, modality) to route. A key is a tuple as Python prints it."""
    key = "route_mappings"
    routes_by_pair = dict[tuple[object, object], str]()
    for text, route in cast(dict[str, object], parameters.get(key, dict, {})).items():
        try:
            pair: object = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            pair = None
        if not isinstance(pair, tuple) or len(cast(tuple[object, ...], pair)) != 2:
            raise parameters.error(f"{text!r:.80} is no pair of a task and a modality.", key)
        if not isinstance(route, str) or route not in routes:
            raise parameters.error(f"{route!r:.80} is no route; routes: {', '.join(routes)}.", key)
        routes_by_pair[cast(tuple[object, object], pair)] = route
    return routes_by_pair
