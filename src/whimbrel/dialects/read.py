"""JSON or MessagePack -> a typed struct, with every way this can fail turned into an InvalidRequest that says where."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec

from whimbrel.errors import InvalidRequest

T = TypeVar("T")

_MAPS: Final = frozenset(bytes([first]) for first in (*range(0x80, 0x90), 0xDE, 0xDF))
_PATH = re.compile(r" - at `\$\.?(.*)`$")


@lru_cache(maxsize=64)
def _decoder(kind: Any, packed: bool) -> msgspec.json.Decoder[Any] | msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind) if packed else msgspec.json.Decoder(kind)


def is_packed(body: bytes) -> bool:
    """Whether a body is an object in MessagePack: no JSON begins with these bytes."""
    return body[:1] in _MAPS


def decode(kind: type[T], body: bytes, *, packed: bool = False) -> T:
    """Decode `body` as `kind`; `packed`: it is MessagePack. Raises InvalidRequest with the path of the fault."""
    if not body or body.isspace():
        raise InvalidRequest("the body is empty; send a JSON object.")
    language = "MessagePack" if packed else "JSON"
    try:
        return _decoder(kind, packed).decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        path = _PATH.search(text)
        param = path[1] or None if path else None
        raise InvalidRequest(f"{_PATH.sub('', text)}{_choices(kind, param)}.", param=param) from None
    except RecursionError:
        raise InvalidRequest(f"the {language} is nested too deeply.") from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8.") from None
    except (msgspec.MsgspecError, ValueError, MemoryError) as error:
        raise InvalidRequest(f"the body is not valid {language}: {error}.") from None


def _choices(kind: type, param: str | None) -> str:
    """What a field takes, where it takes one of a few words."""
    info = msgspec.inspect.type_info(kind)
    fields = info.fields if isinstance(info, msgspec.inspect.StructType) else ()
    name = (param or "").partition("[")[0]
    field = next((field for field in fields if field.encode_name == name), None)
    if field is None:
        return ""
    inner = field.type.type if isinstance(field.type, msgspec.inspect.Metadata) else field.type
    options = inner.types if isinstance(inner, msgspec.inspect.UnionType) else (inner,)
    words = [repr(value) for option in options if isinstance(option, msgspec.inspect.LiteralType) for value in option.values]
    return f"; it takes {', '.join(words)}" if words else ""
