"""JSON or MessagePack -> a typed struct. Every failure becomes an InvalidRequest with its location."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from whimbrel.errors import InvalidRequest, Location, TooLarge

T = TypeVar("T")

MAX_IDS: Final = 2**19
"""The limit of token ids in a request, all inputs together."""
_MAX_STRINGS: Final = 100_000


class MalformedBody(InvalidRequest):
    """The body is empty or is not valid JSON."""


_MAPS: Final = frozenset(bytes([first]) for first in (*range(0x80, 0x90), 0xDE, 0xDF))
_PATH: Final = re.compile(r" - at `\$\.?((\w*).*)`$")
"""The path of a fault, and its first field."""


@lru_cache(maxsize=64)
def _decoder(kind: Any, packed: bool) -> msgspec.json.Decoder[Any] | msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind) if packed else msgspec.json.Decoder(kind)


def is_packed(body: bytes) -> bool:
    """True if a body is an object in MessagePack: no JSON begins with these bytes."""
    return body[:1] in _MAPS


def decode(kind: type[T], body: bytes, *, packed: bool = False) -> T:
    """Decode `body` as `kind`; `packed`: it is MessagePack. Raises InvalidRequest with the path of the fault, TooLarge."""
    if not body or body.isspace():
        raise MalformedBody("the body is empty; send a JSON object.")
    if not packed:
        reject_many(body)
    language = "MessagePack" if packed else "JSON"
    try:
        return _decoder(kind, packed).decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        path = _PATH.search(text)
        location = Location(path[2], path=path[1].removeprefix(path[2])) if path and path[1] else None
        raise InvalidRequest(f"{_PATH.sub('', text)}{_choices(kind, path[1] if path else '')}.", location=location) from None
    except RecursionError:
        raise MalformedBody(f"the {language} is nested too deeply.") from None
    except UnicodeDecodeError:
        raise MalformedBody("the body is not valid UTF-8.") from None
    except (msgspec.MsgspecError, ValueError, MemoryError) as error:
        raise MalformedBody(f"the body is not valid {language}: {error}.") from None


def reject_many(body: bytes) -> None:
    """Raise TooLarge if a body has too many strings or items: decoding a million lists blocks the event loop for a second."""
    if len(body) <= MAX_IDS:
        return
    if _count(body, b'"') > 2 * _MAX_STRINGS and (strings := (_count(body, b'"') - body.count(b'\\"')) // 2) > _MAX_STRINGS:
        raise TooLarge(f"about {strings:,} strings; the limit is {_MAX_STRINGS:,}. Split the request.", param="input")
    if _count(body, b",") > MAX_IDS and (commas := _count(_without_strings(body), b",")) > MAX_IDS:
        raise TooLarge(f"more than {commas:,} token ids or items; the limit is {MAX_IDS:,}. Split the request.", param="input")


def _count(body: bytes, letter: bytes) -> int:
    """Count a letter; bytes.count is slow where there are many."""
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == letter[0]))


def _without_strings(body: bytes) -> bytes:
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes that are left begin and end strings
    return b"".join(plain.split(b'"')[::2])


def _choices(kind: type, path: str) -> str:
    """Return the words that a field takes, if it takes one of a few."""
    types = list(_inside(msgspec.inspect.type_info(kind)))
    for name in path.split("."):
        structs = [info for info in types if isinstance(info, msgspec.inspect.StructType)]
        fields = [field for info in structs for field in info.fields if field.encode_name == name.partition("[")[0]]
        types = [info for field in fields for info in _inside(field.type)]
    words = [repr(value) for info in types if isinstance(info, msgspec.inspect.LiteralType) for value in info.values]
    return f"; it takes {', '.join(words)}" if words else ""


def _inside(info: msgspec.inspect.Type) -> Iterator[msgspec.inspect.Type]:
    """Yield the types that a value, or an item of a list, may have."""
    if isinstance(info, msgspec.inspect.Metadata):
        yield from _inside(info.type)
    elif isinstance(info, msgspec.inspect.UnionType):
        for each in info.types:
            yield from _inside(each)
    elif isinstance(info, msgspec.inspect.ListType):
        yield from _inside(info.item_type)
    else:
        yield info
