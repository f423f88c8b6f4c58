"""Budgets of API keys: requests and tokens over time, and requests in flight, exact over all workers of a server.

Theory of operation. Every key with a budget has a record in one memory, which all workers map. A budget over time is a bucket
that holds its limit at first and refills steadily (GCRA, the virtual scheduling of ATM's policing). Its state is one whole
number, the time at which it would be full, in nanoseconds times the limit. So nothing is rounded, and time needs no thread.
Requests in flight are a column for each worker, which only that worker changes; the supervisor clears those of a worker that
died.

A record belongs to the name of a key, for good: when keys change, those that stay are counted on, and those that come get
records at the end. Beside each state stands the limit in whose units it is. So a limit may change from one request to the next,
and a worker that does not know the new one yet reads and writes the same time.

A worker changes a record under a lock on its bytes (fcntl), held for some microseconds, which the kernel releases when the
process dies. Such locks belong to processes: within one, the event loop takes them one after another. They end when the process
closes any descriptor of the memory, so it closes none while it holds one. Descriptors of one open file share an OFD lock, and
these are of one file, so locks of that newer kind would exclude no process. One process alone counts in memory of its own,
without locks.

The clock is perf_counter, which all processes of a machine share: the time of day may jump. It knows no HTTP, models or texts.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from mmap import mmap
from typing import Final

from whimbrel.errors import RateLimited, TooLarge, Unavailable
from whimbrel.server.keys import ApiKey

_SECOND: Final = 10**9
_MINUTE: Final = 60 * _SECOND
_DAY: Final = 24 * 60 * _MINUTE
_STATE: Final = 24
"""Bytes of a bucket: its state, a limit of up to 2**63 times a time of up to 2**63 nanoseconds, and the limit."""
_LIMIT: Final = 16
"""Place of the limit in them."""
_COLUMN: Final = 8
_LOCK_SECONDS: Final = 0.25
"""Longest wait for a lock. Its holder was stopped in the midst of some microseconds; the supervisor finds and kills it."""
_LOCK_PAUSE: Final = 20e-6
_BUSY_SECONDS: Final = 1.0
"""Retry-After where the end of the wait is not known."""
_NO_RETRY_SECONDS: Final = 60.0
"""Seconds above which clients are told not to try again by themselves."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A budget over time, as arithmetic over its state: `full_at`, in nanoseconds times `limit`. Pure."""

    limit: int
    period: int
    """Nanoseconds in which an empty bucket refills."""
    what: str
    """The budget in words, such as "tokens a minute"."""

    def remaining(self, full_at: int, now: int) -> int:
        return self.limit - -(-self._debt(full_at, now) // self.period)

    def wait(self, full_at: int, now: int, amount: int, *, yields: bool = False) -> int:
        """Return the nanoseconds until `amount` fits, 0 if it does now.

        With `yields` half of the limit is left besides, or as much as an amount above half can leave.
        """
        left = min(self.limit // 2, self.limit - amount) if yields else 0
        missing = self._debt(full_at, now) + (amount + left) * self.period - self.limit * self.period
        return -(-missing // self.limit) if missing > 0 else 0

    def take(self, full_at: int, now: int, amount: int) -> int:
        return max(full_at, now * self.limit) + amount * self.period

    def give_back(self, full_at: int, amount: int) -> int:
        return max(0, full_at - amount * self.period)

    def reset(self, full_at: int, now: int) -> int:
        """Return the nanoseconds until the bucket is full."""
        return -(-self._debt(full_at, now) // self.limit)

    def _debt(self, full_at: int, now: int) -> int:
        return max(full_at - now * self.limit, 0)


@dataclass(frozen=True, slots=True)
class _Record:
    """The budgets of one key, and the place of their states."""

    key: ApiKey
    start: int
    size: int
    requests: Bucket | None
    tokens: tuple[tuple[Bucket, int], ...]
    """Buckets of tokens, each with the place of its state."""


class Budgets:
    """The budgets of all keys, for one process. `usage` gives those of a request."""

    def __init__(
        self,
        keys: Sequence[ApiKey],
        memory: mmap | bytearray,
        *,
        fd: int | None = None,
        places: Mapping[str, int] | None = None,
        num_columns: int = 1,
        column: int = 0,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """`memory` has `memory_size` bytes, at first zero; `fd` is its descriptor where several processes share it.

        `places` are those of `give_places`, if there were keys before.
        """
        self._fd = fd
        self._num_columns = num_columns
        self._column = column
        self._clock = clock
        self.renew(keys, give_places(keys, {}) if places is None else places, memory)

    def renew(self, keys: Sequence[ApiKey], places: Mapping[str, int], memory: mmap | bytearray) -> None:
        """Take other keys from now on. Requests end where they were counted. `memory` may have grown."""
        self._memory = memoryview(memory)
        size = _record_size(self._num_columns)
        self._records = {key.name: _make_record(key, places[key.name] * size, size) for key in keys if key.has_budget}

    @staticmethod
    def memory_size(keys: Collection[ApiKey | str], num_columns: int = 1) -> int:
        """Return the bytes that the budgets of these keys or names of keys take, at least one record's."""
        return max(1, sum(isinstance(key, str) or key.has_budget for key in keys)) * _record_size(num_columns)

    @classmethod
    def of_one_process(cls, keys: Sequence[ApiKey], clock: Callable[[], int] = time.perf_counter_ns) -> Budgets | None:
        """Return budgets in memory of their own; None if no key has one."""
        if not any(key.has_budget for key in keys):
            return None
        return cls(keys, bytearray(cls.memory_size(keys)), clock=clock)

    def usage(self, key: ApiKey, *, yields: bool = False) -> Usage | None:
        """Return the account of one request of a key; None if the key has no budget.

        A request that `yields` leaves half of what may be used over time to others.
        """
        record = self._records.get(key.name)
        return None if record is None else Usage(self, record, yields=yields)

    def clear_column(self, column: int) -> None:
        """Forget the requests in flight of a worker that has died, also those of keys that went."""
        size = _record_size(self._num_columns)
        for start in range(0, len(self._memory) - size + 1, size):
            place = _column_place(start, column)
            self._memory[place : place + _COLUMN] = bytes(_COLUMN)

    @contextmanager
    def locked(self, record: _Record) -> Generator[int]:
        """Hold the lock of a record. Gives the time. Raises Unavailable if its holder does not go on."""
        if self._fd is None:
            yield self._clock()
            return
        self._lock(self._fd, record)
        try:
            yield self._clock()  # after the wait: no holder sees a time before that of the last
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, record.size, record.start)

    def _lock(self, fd: int, record: _Record) -> None:
        until = 0.0
        while True:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, record.size, record.start)
            except BlockingIOError:
                now = time.perf_counter()
                until = until or now + _LOCK_SECONDS
                if now > until:
                    raise Unavailable("the budgets of this API key are locked by another process.") from None
                time.sleep(_LOCK_PAUSE)
            else:
                return

    def read(self, place: int, bucket: Bucket) -> int:
        """Return the state of a bucket. One that was written under another limit is full at the same time."""
        state = int.from_bytes(self._memory[place : place + _LIMIT], "little")
        limit = int.from_bytes(self._memory[place + _LIMIT : place + _STATE], "little")
        return state if limit in (bucket.limit, 0) else state * bucket.limit // limit

    def read_tokens(self, record: _Record) -> list[tuple[Bucket, int]]:
        """Return the buckets of tokens, each with its state."""
        return [(bucket, self.read(place, bucket)) for bucket, place in record.tokens]

    def write(self, place: int, bucket: Bucket, state: int) -> None:
        self._memory[place : place + _STATE] = state.to_bytes(_LIMIT, "little") + bucket.limit.to_bytes(
            _STATE - _LIMIT, "little"
        )

    def in_flight(self, record: _Record) -> int:
        return sum(self._count(record, column) for column in range(self._num_columns))

    def add_in_flight(self, record: _Record, change: int) -> None:
        place = _column_place(record.start, self._column)
        self._memory[place : place + _COLUMN] = (self._count(record, self._column) + change).to_bytes(_COLUMN, "little")

    def _count(self, record: _Record, column: int) -> int:
        place = _column_place(record.start, column)
        return int.from_bytes(self._memory[place : place + _COLUMN], "little")


class Usage:
    """One request of a key that has budgets: `begin` at its head, `charge` for its tokens, and `end` in any case."""

    __slots__ = ("_begun", "_budgets", "_charged", "_record", "_requests", "_tokens", "_yields")

    def __init__(self, budgets: Budgets, record: _Record, *, yields: bool) -> None:
        self._budgets = budgets
        self._yields = yields
        self._record = record
        self._begun = False
        self._charged = 0
        self._requests = self._tokens = (0, 0, 0)
        """Limit, remaining number and nanoseconds until the bucket is full, as last seen."""

    def begin(self) -> None:
        """Count the request. Raises RateLimited, and then counts nothing."""
        budgets, record = self._budgets, self._record
        key, requests = record.key, record.requests
        with budgets.locked(record) as now:
            state = 0 if requests is None else budgets.read(record.start, requests)
            most = key.requests_in_flight
            too_many = most is not None and budgets.in_flight(record) >= most
            wanted = ((requests, state),) if requests is not None else ()
            tokens = budgets.read_tokens(record)
            waits = [(bucket.wait(full_at, now, 1, yields=self._yields), bucket) for bucket, full_at in (*wanted, *tokens)]
            refused = too_many or any(wait for wait, _ in waits)
            if not refused:
                if requests is not None:
                    state = requests.take(state, now, 1)
                    budgets.write(record.start, requests, state)
                budgets.add_in_flight(record, 1)
                self._begun = True
        self._note(now, state, tokens)
        if refused:
            raise self._refusal(waits, 1, too_many=too_many)

    def charge(self, num_tokens: int) -> None:
        """Take the tokens of the request. Raises RateLimited, and TooLarge if no wait would help; then nothing is taken."""
        budgets, record = self._budgets, self._record
        for bucket, _ in record.tokens:
            if num_tokens > bucket.limit:
                raise TooLarge(
                    f"the request has {num_tokens:,} tokens; the API key {record.key.name} may use {bucket.limit:,} "
                    f"{bucket.what}. Send fewer texts at once.",
                    param="input",
                )
        if not record.tokens or not num_tokens:
            return
        with budgets.locked(record) as now:
            tokens = budgets.read_tokens(record)
            waits = [(bucket.wait(full_at, now, num_tokens, yields=self._yields), bucket) for bucket, full_at in tokens]
            if not (refused := any(wait for wait, _ in waits)):
                tokens = [(bucket, bucket.take(full_at, now, num_tokens)) for bucket, full_at in tokens]
                for (_, place), (bucket, full_at) in zip(record.tokens, tokens, strict=True):
                    budgets.write(place, bucket, full_at)
                self._charged += num_tokens
        self._note(now, None, tokens)
        if refused:
            raise self._refusal(waits, num_tokens)

    def end(self, *, give_back: bool) -> None:
        """End the request, if it was begun. `give_back` returns its tokens, as the server failed it."""
        budgets, record = self._budgets, self._record
        if not self._begun:
            return
        self._begun = False
        budgets.add_in_flight(record, -1)
        if give_back and self._charged:
            with suppress(Unavailable), budgets.locked(record):
                for bucket, place in record.tokens:
                    budgets.write(place, bucket, bucket.give_back(budgets.read(place, bucket), self._charged))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that OpenAI's API has, of the bucket of tokens that has the fewest left."""
        found: list[tuple[bytes, bytes]] = []
        for what, (limit, remaining, reset) in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if limit:
                found += [
                    (b"x-ratelimit-limit-" + what, b"%d" % limit),
                    (b"x-ratelimit-remaining-" + what, b"%d" % remaining),
                    (b"x-ratelimit-reset-" + what, format_duration(reset).encode()),
                ]
        return found

    def _note(self, now: int, requests: int | None, tokens: list[tuple[Bucket, int]]) -> None:
        if requests is not None and (bucket := self._record.requests) is not None:
            self._requests = bucket.limit, bucket.remaining(requests, now), bucket.reset(requests, now)
        if tokens:
            of_each = ((bucket.remaining(state, now), bucket, state) for bucket, state in tokens)
            remaining, bucket, state = min(of_each, key=lambda each: each[0])
            self._tokens = bucket.limit, remaining, bucket.reset(state, now)

    def _refusal(self, waits: Sequence[tuple[int, Bucket]], amount: int, *, too_many: bool = False) -> RateLimited:
        wait, bucket = max(waits, key=lambda each: each[0], default=(0, None))
        key = self._record.key
        if bucket is None or not wait:
            assert too_many
            text = f"the API key {key.name} may have {key.requests_in_flight:,} requests in flight, and has them."
            return RateLimited(text, retry_after=_BUSY_SECONDS)
        needs = f", and this request has {amount:,}" if amount > 1 else ", which are used up"
        seconds = wait / _SECOND
        text = f"the API key {key.name} may use {bucket.limit:,} {bucket.what}{needs}; try again in {format_duration(wait)}."
        error = RateLimited(text, retry_after=seconds)
        if seconds > _NO_RETRY_SECONDS:
            error.retry = False
        return error


def format_duration(nanoseconds: int) -> str:
    """Return a duration as OpenAI's headers have it: 20ms, 1.5s, 6m0s or 23h59m59s. Milliseconds are rounded up."""
    milliseconds = ceil(nanoseconds / 10**6)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest // 1000}" if rest % 1000 == 0 else f"{rest / 1000:.3f}".rstrip("0")
    return f"{f'{hours}h' if hours else ''}{f'{minutes}m' if hours or minutes else ''}{seconds}s"


def give_places(keys: Sequence[ApiKey], before: Mapping[str, int]) -> dict[str, int]:
    """Return the number of each key's record, by name: that which it had before, or the next one.

    No record is ever another key's, since requests of a key that went may still be counted in it.
    """
    places = dict(before)
    for key in keys:
        if key.has_budget:
            places.setdefault(key.name, len(places))
    return places


def _record_size(num_columns: int) -> int:
    return _column_place(0, num_columns)


def _column_place(start: int, column: int) -> int:
    return start + 3 * _STATE + column * _COLUMN


def _make_record(key: ApiKey, start: int, size: int) -> _Record:
    requests = None if key.requests_per_minute is None else Bucket(key.requests_per_minute, _MINUTE, "requests a minute")
    stated = ((key.tokens_per_minute, _MINUTE, "tokens a minute"), (key.tokens_per_day, _DAY, "tokens a day"))
    tokens = tuple(
        (Bucket(limit, period, what), start + number * _STATE)
        for number, (limit, period, what) in enumerate(stated, start=1)
        if limit is not None
    )
    return _Record(key, start, size, requests, tokens)
