"""Decoding of request bodies, JSON and MessagePack. Every failure is an InvalidRequest with its location."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from whimbrel.dialects.common.faults import MalformedBody, MissingField, UnknownWord
from whimbrel.dialects.common.rules import MAX_IDS, check
from whimbrel.errors import InvalidRequest, Location, TooLarge
from whimbrel.wire import whole_numbers

T = TypeVar("T")

_MAX_STRINGS: Final = 100_000


_MAPS: Final = frozenset(bytes([first]) for first in (*range(0x80, 0x90), 0xDE, 0xDF))
_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")
_PATH: Final = re.compile(r" - at `\$\.?((\w*).*)`$")


@lru_cache(maxsize=64)
def _decoder(kind: Any, packed: bool) -> msgspec.json.Decoder[Any] | msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind) if packed else msgspec.json.Decoder(kind)


def is_packed(body: bytes) -> bool:
    """Return whether a body is an object in MessagePack: no JSON begins with these bytes."""
    return body[:1] in _MAPS


def decode(kind: type[T], body: bytes, *, packed: bool = False) -> T:
    """Decode JSON or, if `packed`, MessagePack, and check the rules of its fields.

    Raises InvalidRequest with the path of the fault, and TooLarge.
    """
    if not body or body.isspace():
        raise MalformedBody("the body is empty; send a JSON object.")
    if not packed:
        reject_many(body)
    language = "MessagePack" if packed else "JSON"
    try:
        decoded: T = whole_numbers.decode(_decoder(kind, packed), body)
    except msgspec.ValidationError as error:
        raise _located(str(error), kind) from None
    except RecursionError:
        raise MalformedBody(f"the {language} is nested too deeply.") from None
    except UnicodeDecodeError:
        raise MalformedBody("the body is not valid UTF-8.") from None
    except (msgspec.MsgspecError, ValueError, MemoryError) as error:
        raise MalformedBody(f"the body is not valid {language}: {error}.") from None
    check(decoded)
    return decoded


def _located(text: str, kind: type) -> InvalidRequest:
    """Return the error of a value that is not of its type, with its place."""
    match = _PATH.search(text)
    path = match[1] if match else ""
    if missing := _MISSING.match(text):
        path = f"{path}.{missing[1]}" if path else missing[1]
    field = re.match(r"\w*", path)
    location = Location(field[0], path=path.removeprefix(field[0])) if field and path else None
    if missing:
        return MissingField("is missing; it is required.", location=location)
    choices = _choices(kind, path)
    error_type = UnknownWord if choices else InvalidRequest
    return error_type(f"{_PATH.sub('', text)}{choices}.", location=location)


def reject_many(body: bytes) -> None:
    """Raise TooLarge if a body has too many strings or items: decoding a million lists blocks the event loop for a second."""
    if len(body) <= MAX_IDS:
        return
    if _count(body, b'"') > 2 * _MAX_STRINGS and (strings := (_count(body, b'"') - body.count(b'\\"')) // 2) > _MAX_STRINGS:
        raise TooLarge(f"about {strings:,} strings; the limit is {_MAX_STRINGS:,}. Split the request.", param="input")
    if _count(body, b",") > MAX_IDS and (commas := _count(_without_strings(body), b",")) > MAX_IDS:
        raise TooLarge(f"more than {commas:,} token ids or items; the limit is {MAX_IDS:,}. Split the request.", param="input")


def _count(body: bytes, letter: bytes) -> int:
    """Return the count of a byte; bytes.count is slow for frequent bytes."""
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == letter[0]))


def _without_strings(body: bytes) -> bytes:
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes that are left begin and end strings
    return b"".join(plain.split(b'"')[::2])


def _choices(kind: type, path: str) -> str:
    """Return the accepted words of a field, if it takes only some."""
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
