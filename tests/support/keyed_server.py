"""`whimbrel serve` with a table of API keys.

    python tests/support/keyed_server.py keys.json workers=2

`keys.json` holds what the tables `[keys.NAME]` of a configuration file hold; the other arguments are those of --set.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import orjson


def main() -> None:
    from whimbrel.cli.serve import serve
    from whimbrel.server.config_file import Config
    from whimbrel.server.keys import read_keys
    from whimbrel.server.settings_table import read_settings

    keys = read_keys(orjson.loads(Path(sys.argv[1]).read_bytes()), lambda *_: "keys.json")
    settings = read_settings({"port": 0}, sys.argv[2:], os.environ)
    sys.exit(serve((), Config(settings=settings, keys=keys)))


if __name__ == "__main__":
    main()
