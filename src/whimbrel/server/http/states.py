"""States of a connection and of its requests, and the events that change them, as tables.

Theory of operation. A client may send further requests before the first is answered, so what comes in and what goes out have
states of their own. A connection has one `Reading`: the meaning of the client's next bytes. Each request has one `Body`, which
ends when the app has read it, and one `Answer`. A step that a table does not have is a bug, and raises KeyError.

Four rules join the states. Each is one place in `connection.py`:

- The socket is read in the states PARSED if at most one request is not answered, and while DISCARDING.
- The app runs for the oldest request. When its answer is DONE, the next one follows if the request was whole.
- Otherwise, or if either side asked for the end, or after the answer to a BROKEN request, that answer was the last one.
- Without a request, IDLE and HEAD last as long as a head may take. DISCARDING lasts as long as a drain may take.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Event(StrEnum):
    # of the parser
    HEAD_BEGINS = "head begins"
    HEAD_ENDS = "head ends"
    BODY_ENDS = "body ends"
    UPGRADE = "upgrade"
    """An offer of another protocol, which is not taken: the request goes on, but its parser has stopped."""
    MALFORMED = "malformed"
    # of the socket
    CLIENT_ENDS = "client ends"
    """The client will send nothing more. It may still read."""
    LOST = "lost"
    # of a request
    BODY_COMES = "body comes"
    CUT_OFF = "cut off"
    """The rest of the body cannot come, or the client has gone."""
    # of the app
    ASKED = "asked"
    """The client was asked for the body that it holds back."""
    TAKEN = "taken"
    """The app has the whole body."""
    ANSWER_BEGINS = "answer begins"
    ANSWER_ENDS = "answer ends"
    LAST_ANSWER = "last answer"


class Reading(StrEnum):
    """The meaning of the next bytes of the client."""

    IDLE = "idle"
    """The start of a request."""
    HEAD = "head"
    """The rest of a head."""
    BODY = "body"
    """The rest of a body."""
    RESUMING = "resuming"
    """No bytes of the client: a new parser is told of the head that stopped the one before it."""
    BROKEN = "broken"
    """Nothing: what came is no HTTP or more than the limits allow. The error is still to be answered."""
    ENDED = "ended"
    """Nothing: the client has closed its side. Whole requests are still to be answered."""
    DISCARDING = "discarding"
    """Nothing of interest: the last answer is written, and the client may not have stopped yet."""
    CLOSED = "closed"


class Body(StrEnum):
    """The body of a request, as far as the app is concerned."""

    EXPECTED = "expected"
    """The client sends it when it is asked to (100-continue)."""
    COMING = "coming"
    WHOLE = "whole"
    """All of it has come."""
    TAKEN = "taken"
    """The app has all of it."""
    CUT = "cut"
    """The rest will never come, or the client has gone."""


class Answer(StrEnum):
    """The answer to a request."""

    AWAITED = "awaited"
    BEGUN = "begun"
    DONE = "done"


_ANY: Final = {Event.LOST: Reading.CLOSED}
_LISTENING: Final = _ANY | {
    Event.MALFORMED: Reading.BROKEN,
    Event.CLIENT_ENDS: Reading.ENDED,
    Event.LAST_ANSWER: Reading.DISCARDING,
}
"""Steps from each of the states PARSED."""

READING: Final[Mapping[Reading, Mapping[Event, Reading]]] = {
    Reading.IDLE: _LISTENING | {Event.HEAD_BEGINS: Reading.HEAD},
    Reading.HEAD: _LISTENING | {Event.HEAD_ENDS: Reading.BODY},
    Reading.BODY: _LISTENING | {Event.BODY_ENDS: Reading.IDLE, Event.UPGRADE: Reading.RESUMING},
    Reading.RESUMING: _ANY
    | {Event.HEAD_BEGINS: Reading.RESUMING, Event.HEAD_ENDS: Reading.BODY, Event.MALFORMED: Reading.BROKEN},
    Reading.BROKEN: _ANY | {Event.CLIENT_ENDS: Reading.BROKEN, Event.LAST_ANSWER: Reading.DISCARDING},
    Reading.ENDED: _ANY | {Event.LAST_ANSWER: Reading.ENDED},
    Reading.DISCARDING: _ANY | {Event.CLIENT_ENDS: Reading.ENDED},
    Reading.CLOSED: {},
}

_COMING: Final = {Event.BODY_COMES: Body.COMING, Event.BODY_ENDS: Body.WHOLE, Event.CUT_OFF: Body.CUT}
BODY: Final[Mapping[Body, Mapping[Event, Body]]] = {
    Body.EXPECTED: _COMING | {Event.ASKED: Body.COMING},
    Body.COMING: _COMING,
    Body.WHOLE: {Event.TAKEN: Body.TAKEN, Event.CUT_OFF: Body.CUT},
    Body.TAKEN: {Event.CUT_OFF: Body.CUT},
    Body.CUT: {Event.CUT_OFF: Body.CUT},
}

ANSWER: Final[Mapping[Answer, Mapping[Event, Answer]]] = {
    Answer.AWAITED: {Event.ANSWER_BEGINS: Answer.BEGUN},
    Answer.BEGUN: {Event.ANSWER_ENDS: Answer.DONE},
    Answer.DONE: {},
}

PARSED: Final = frozenset({Reading.IDLE, Reading.HEAD, Reading.BODY})
"""States in which bytes go to the parser."""
COMPLETE: Final = frozenset({Body.WHOLE, Body.TAKEN})
"""States in which the whole body has come."""
