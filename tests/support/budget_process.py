"""A process that takes from the budgets of a key, whose memory is a descriptor that it inherits.

    python tests/support/budget_process.py FD NUM_COLUMNS COLUMN TRIES '{"requests_per_minute": 100}'

At a clock that stands still it begins TRIES requests of three tokens, and prints how many passed. It ends none.
"""

from __future__ import annotations

import mmap
import sys

import orjson

from whimbrel.errors import RateLimited
from whimbrel.server.budgets import Budgets
from whimbrel.server.keys import ApiKey


def limited(**budgets: int) -> ApiKey:
    """Return a key with these budgets."""
    return ApiKey(name="k", digest=bytes(32), **budgets)


def main() -> None:
    fd, num_columns, column, tries = map(int, sys.argv[1:5])
    key = limited(**orjson.loads(sys.argv[5]))
    memory = mmap.mmap(fd, 0)
    budgets = Budgets([key], memory, fd=fd, num_columns=num_columns, column=column, clock=lambda: 10**15)
    sys.stdin.readline()  # until all processes are there
    passed = 0
    for _ in range(tries):
        usage = budgets.usage(key)
        assert usage is not None
        try:
            usage.begin()
            usage.charge(3)
        except RateLimited:
            continue
        passed += 1
    print(passed, flush=True)  # noqa: T201
    sys.stdin.readline()  # until this process may end


if __name__ == "__main__":
    main()
