"""Records of files and batches on the disk, and the objects of OpenAI's API that clients see of them. Pure.

Source: openai-python, types/file_object.py and types/batch.py.
"""

import os
import re
import time
from typing import Any, Final, Literal, TypeAlias

import msgspec

from whimbrel.server.batches.journal import Progress

WINDOW: Final = "24h"
WINDOW_SECONDS: Final = 24 * 3600
KEPT_SECONDS: Final = 30 * 24 * 3600
"""Time after which files, and batches that ended, are removed unless a client says otherwise, as OpenAI does."""
MAX_REQUESTS: Final = 50_000
"""The limit of requests in a batch: OpenAI's."""
FILE_ID: Final = re.compile(r"file-[0-9a-f]{32}")
BATCH_ID: Final = re.compile(r"batch_[0-9a-f]{32}")

Purpose: TypeAlias = Literal["batch", "batch_output"]
Status: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED: Final[frozenset[Status]] = frozenset({"failed", "completed", "expired", "cancelled"})


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    """SHA-256 of the API key that made it, "" if the server had none."""
    filename: str
    purpose: Purpose
    bytes: int
    created_at: int
    expires_at: int

    def view(self) -> "FileObject":
        about = msgspec.structs.asdict(self)
        del about["owner"]
        return FileObject(**about)


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file as its client sees it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as its client asked for it. It does not change."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_seconds: int = KEPT_SECONDS


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a batch. Only the process that runs batches writes it."""

    status: Status = "validating"
    outcome: Status | None = None
    """The status that it will have when it has been finalized."""
    total: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    ended_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class Problems(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[Problem, ...]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as its client sees it. Times are in seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: Problems | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def view_batch(record: BatchRecord, state: BatchState, progress: Progress, cancelled_at: int | None) -> BatchObject:
    """Return the object that clients see. `cancelled_at` is the time at which it was asked to end, None if it was not."""
    is_cancelling = cancelled_at is not None and not state.has_ended and state.outcome in (None, "cancelled")
    ended: dict[str, Any] = {f"{status}_at": state.ended_at if state.status == status else None for status in ENDED}
    return BatchObject(
        id=record.id,
        endpoint=record.endpoint,
        errors=Problems(data=state.problems) if state.problems else None,
        input_file_id=record.input_file_id,
        completion_window=record.completion_window,
        status="cancelling" if is_cancelling else state.status,
        output_file_id=state.output_file_id if state.has_ended else None,
        error_file_id=state.error_file_id if state.has_ended else None,
        created_at=record.created_at,
        in_progress_at=state.in_progress_at,
        expires_at=record.expires_at,
        finalizing_at=state.finalizing_at,
        cancelling_at=cancelled_at,
        request_counts=RequestCounts(total=state.total, completed=progress.completed, failed=progress.failed),
        metadata=record.metadata,
        **ended,
    )


def new_id(prefix: str) -> str:
    """Return an id that sorts by the time at which it is made."""
    return f"{prefix}{time.time_ns() // 1000:016x}{os.urandom(8).hex()}"


def now() -> int:
    return int(time.time())
