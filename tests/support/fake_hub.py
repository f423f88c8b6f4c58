"""A hub of models on this machine, which speaks as much of the hub's API as its client library asks for, and has faults.

It has a model's revisions as tables of files, answers parts of files, and gives large ones by a redirect as the hub does.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

LARGE = 4_096
"""Files of this size and above are kept as the hub keeps large files: their SHA-256 is known."""


@dataclass
class Repository:
    revisions: dict[str, dict[str, bytes]]
    """Branch or tag -> files."""
    licence: str = "mit"
    gated: bool = False

    def commit(self, revision: str) -> str | None:
        """Return the commit of a branch, a tag or a commit. It depends on the files."""
        commits = {name: _commit(files) for name, files in self.revisions.items()}
        return commits.get(revision) or (revision if revision in commits.values() else None)

    def files(self, commit: str) -> dict[str, bytes]:
        return next(files for name, files in self.revisions.items() if self.commit(name) == commit)


@dataclass
class Faults:
    status: int = 0
    """Answered to all requests, unless it is 0."""
    headers: dict[str, str] = field(default_factory=dict)
    page: bytes | None = None
    """Answered to all requests in place of a hub's answer."""
    token: str | None = None
    """The only token that is right."""
    break_after: dict[str, int] = field(default_factory=dict)
    """File -> bytes after which its connection breaks, once for each request while it is there."""
    num_breaks: int = 10**9
    """Number of connections that break."""
    content: dict[str, bytes] = field(default_factory=dict)
    """File -> the bytes that are sent in its place."""
    no_ranges: bool = False
    pause: float = 0.0
    """Seconds between pieces of a large file."""
    piece: int = 65_536


class FakeHub:
    """The hub at `url`. `requests` holds the method, path and range of each request; `bytes_sent` what was sent of large files."""

    def __init__(self, repositories: dict[str, Repository]) -> None:
        self.repositories, self.faults = repositories, Faults()
        self.requests: list[tuple[str, str, str]] = []
        self.bytes_sent: dict[str, int] = {}
        self.has_leaked = False
        """A token came to the host of large files."""
        self.lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            def setup(self) -> None:
                self.hub = hub
                super().setup()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.cdn = self.url.replace("127.0.0.1", "localhost")
        """Address of large files. It is another host's, so that no token is sent there."""
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def ranges(self, file: str) -> list[str]:
        """Return the ranges of the requests for a large file's content; of the whole, an empty one."""
        return [asked for method, path, asked in self.requests if method == "GET" and path.endswith(f"/cdn/{file}")]


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, faults = unquote(urlsplit(self.path).path), self.hub.faults
        with self.hub.lock:
            self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        if faults.page is not None:
            self._answer(200, faults.page)
        elif faults.status:
            self._answer(faults.status, b"{}", **faults.headers)
        elif cdn := re.fullmatch(r"/([^/]+/[^/]+)/([0-9a-f]{40})/cdn/(.+)", path):
            self._send_large(*cdn.groups())
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree)/(.+)|/(refs))?", path):
            self._api(*found.groups())
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*found.groups())
        else:
            self._answer(404, b"{}")

    def _repository(self, name: str, *, content: bool) -> Repository | None:
        """Return a repository, or answer that there is none for this client."""
        faults, given = self.hub.faults, self.headers.get("Authorization", "").removeprefix("Bearer ")
        found = self.hub.repositories.get(name)
        if given and faults.token is not None and given != faults.token:
            self._answer(401, b"{}", X_Error_Message="Invalid credentials in Authorization header")
            return None
        if found is None:
            self._answer(404 if given else 401, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
            return None
        if content and found.gated and (not given or given != faults.token):
            self._answer(403 if given else 401, b"{}", X_Error_Code="GatedRepo", X_Error_Message="Access is restricted")
            return None
        return found

    def _api(self, name: str, kind: str | None, revision: str | None, refs: str | None) -> None:
        if (found := self._repository(name, content=False)) is None:
            return
        commit = found.commit(revision or "main")
        if refs:
            rows = [{"name": each, "ref": f"refs/heads/{each}", "targetCommit": found.commit(each)} for each in found.revisions]
            self._json({"branches": rows, "tags": [], "converts": []})
        elif commit is None:
            self._answer(404, b"{}", X_Error_Code="RevisionNotFound")
        elif kind == "tree":
            rows = found.files(commit).items()
            self._json([
                {"type": "file", "path": path, "size": len(data), "oid": _git(data)} | _large(data) for path, data in rows
            ])  # fmt: skip
        else:
            siblings = [
                {"rfilename": path, "size": len(data), "blobId": _git(data)} | _large(data)
                for path, data in found.files(commit).items()
            ]
            tags = [f"license:{found.licence}"]
            self._json({"id": name, "sha": commit, "siblings": siblings, "tags": tags, "gated": found.gated})

    def _resolve(self, name: str, revision: str, path: str) -> None:
        if (found := self._repository(name, content=True)) is None:
            return
        commit = found.commit(revision)
        data = found.files(commit).get(path) if commit else None
        if commit is None or data is None:
            self._answer(404, b"", X_Error_Code="EntryNotFound")
        elif len(data) < LARGE:
            self._answer(200, data, X_Repo_Commit=commit, ETag=f'"{_git(data)}"')
        else:
            about = {"X_Linked_Size": str(len(data)), "X_Linked_ETag": f'"{_lfs(data)["sha256"]}"', "X_Repo_Commit": commit}
            self._answer(302, b"", Location=f"{self.hub.cdn}/{name}/{commit}/cdn/{path}", **about)

    def _send_large(self, name: str, commit: str, path: str) -> None:
        faults = self.hub.faults
        self.hub.has_leaked |= "Authorization" in self.headers
        data = faults.content.get(path, self.hub.repositories[name].files(commit)[path])
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked and not faults.no_ranges else 0
        about = {"Content_Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        self._head(206 if start else 200, len(data) - start, **about)
        if self.command == "HEAD":
            return
        end = start + faults.break_after.get(path, len(data))
        is_broken = end < len(data) and faults.num_breaks > 0
        if is_broken:
            faults.num_breaks -= 1
        else:
            end = len(data)
        for offset in range(start, end, faults.piece):
            piece = data[offset : min(offset + faults.piece, end)]
            self.wfile.write(piece)
            self.wfile.flush()
            with self.hub.lock:
                self.hub.bytes_sent[path] = self.hub.bytes_sent.get(path, 0) + len(piece)
            until = time.monotonic() + faults.pause
            while faults.pause and time.monotonic() < until:  # a test may end the pause
                time.sleep(0.02)
        if is_broken:
            self.close_connection = True

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # the client has left
            self.close_connection = True

    def finish(self) -> None:
        try:
            super().finish()
        except OSError:
            return

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self._head(status, len(body), **headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, size: int, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()


def _commit(files: dict[str, bytes]) -> str:
    digest = hashlib.sha1()
    for name, data in sorted(files.items()):
        digest.update(b"%s %d\0" % (name.encode(), len(data)))
        digest.update(data)
    return digest.hexdigest()


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _large(data: bytes) -> dict[str, Any]:
    return {"lfs": _lfs(data)} if len(data) >= LARGE else {}


def _lfs(data: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    return {"oid": digest, "sha256": digest, "size": len(data), "pointerSize": 130}
