"""The command `whimbrel key`: makes an API key and its table for the configuration file, or hashes one.

Keys are read from stdin and never from arguments, which every user of the machine can see.
"""

import json
import re
import sys
from getpass import getpass
from secrets import token_hex
from typing import Annotated, Final

import typer
from rich.markup import escape

from whimbrel.cli.console import print_json
from whimbrel.cli.shared_options import OUTPUT_PANEL, AsJson, flag
from whimbrel.errors import SetupError

_SHORT: Final = 20
"""Characters below which a key may be guessed from its hash."""
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


def key(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help=escape("Name in metrics and logs. [default: a random one]"))
    ] = None,
    *,
    hashes: Annotated[
        bool, flag("--hash", "Read a key that exists from stdin, and print its hash.", panel=OUTPUT_PANEL)
    ] = False,
    as_json: AsJson = False,
) -> None:
    from whimbrel.server.keys import hash_of, make_key, read_keys

    if hashes:
        print(hash_of(_read_key()))  # noqa: T201
        return
    made, name = make_key(), f"key-{token_hex(3)}" if name is None else name
    hashed = hash_of(made)
    read_keys({name: {"hash": hashed}}, lambda *_: "NAME")
    if as_json:
        print_json({"name": name, "key": made, "hash": hashed})
        return
    print(f"The key, which is shown only now: {made}", file=sys.stderr)  # noqa: T201
    table = name if _BARE.fullmatch(name) else json.dumps(name)
    print(f'\n[keys.{table}]\nhash = "{hashed}"')  # noqa: T201


def _read_key() -> str:
    text = getpass("API key: ", stream=sys.stderr) if sys.stdin.isatty() else sys.stdin.readline()
    found = text.strip()
    if not found or not found.isascii() or not found.isprintable():
        raise SetupError("stdin holds no API key: printable ASCII on one line.", hint="whimbrel key --hash < file")
    if len(found) < _SHORT:
        print(f"warning: fewer than {_SHORT} characters; who has the hash may guess such a key", file=sys.stderr)  # noqa: T201
    return found
