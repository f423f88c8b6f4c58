"""Lines of batch files, their journal and their run: pure parts and files, without a model."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from whimbrel.server.batches import lines, partial
from whimbrel.server.batches.journal import Journal, Progress, read_progress
from whimbrel.server.batches.lines import LineAnswer, LineError
from whimbrel.server.batches.reading import Line, LineReader
from whimbrel.server.batches.run import Window, Written, in_thread, run_lines

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "text"}}
ANSWERS = "answers.jsonl"


def raw(**changes: Any) -> bytes:
    return json.dumps({name: value for name, value in (GOOD | changes).items() if value is not None}).encode()


def test_a_line_is_read_as_openai_and_vllm_write_it() -> None:
    line = lines.parse_line(raw(extra=1))
    assert (line.custom_id, line.url, json.loads(bytes(line.body))) == ("a", "/v1/embeddings", {"input": "text"})


@pytest.mark.parametrize(
    ("data", "code", "param", "custom_id"),
    [
        (b"no json", "invalid_json_line", None, ""),
        (b"[1]", "invalid_request", None, ""),
        (raw()[:-1], "invalid_json_line", None, ""),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None, ""),
        (b"[" * 100_000, "invalid_request", None, ""),
        (b'{"custom_id":"a","x":' + b"[" * 100_000, "invalid_json_line", None, ""),
        (raw(custom_id=None), "missing_required_parameter", "custom_id", ""),
        (raw(url=None), "missing_required_parameter", "url", "a"),
        (raw(body=None), "missing_required_parameter", "body", "a"),
        (raw(custom_id=7), "invalid_request", "custom_id", ""),
        (raw(method="GET"), "invalid_method", "method", "a"),
        (raw(body="text"), "invalid_request", "body", "a"),
        (raw(body=[1]), "invalid_request", "body", "a"),
    ],
)
def test_a_line_that_is_no_request_is_refused_with_its_field(data: bytes, code: str, param: str | None, custom_id: str) -> None:
    with pytest.raises(LineError) as caught:
        lines.parse_line(data)
    assert (caught.value.code, caught.value.param, caught.value.custom_id) == (code, param, custom_id)
    answer = lines.refusal(caught.value, 3)
    assert json.loads(answer.body)["error"]["message"].startswith("line 3: ")


def test_answers_are_written_as_vllm_and_as_openai_write_them() -> None:
    good, bad = LineAnswer(200, b'{"x":1}'), LineAnswer(404, b'{"error":{"code":"no"}}')
    assert json.loads(lines.render_for_vllm("i", "ü\n", good)) == {
        "id": "i", "custom_id": "ü\n", "response": {"status_code": 200, "request_id": "i", "body": {"x": 1}}, "error": None,
    }  # fmt: skip
    line = json.loads(lines.render_for_vllm("i", "a", bad))
    assert (line["response"]["status_code"], line["response"]["body"], line["error"]) == (404, None, {"error": {"code": "no"}})
    line = json.loads(lines.render_for_openai("i", "a", bad))
    assert (line["response"]["body"], line["error"]) == ({"error": {"code": "no"}}, None)
    line = json.loads(lines.render_not_run("i", "a", "batch_expired", "too late"))
    assert (line["response"], line["error"]) == (None, {"code": "batch_expired", "message": "too late"})


def test_an_answer_that_no_line_can_hold_is_refused() -> None:
    assert lines.readable(LineAnswer(200, b"\0\1", "application/octet-stream")).status == 400
    assert lines.readable(LineAnswer(503, b"<html>", "text/html")).status == 503
    assert lines.readable(LineAnswer(200, b'{"a":\n1}')).body == b'{"a":1}'
    for broken in (b'{"a":\n', b'{"a":1', b"", b"[" * 100_000):
        assert lines.readable(LineAnswer(200, broken)).status == 502
    cut = lines.readable(LineAnswer(500, b""))
    assert (cut.status, json.loads(cut.body)["error"]["code"]) == (500, "invalid_answer")


def test_ids_of_lines_are_the_same_whenever_they_are_run() -> None:
    assert lines.id_of("batch", 1) == lines.id_of("batch", 1) != lines.id_of("batch", 2)
    assert lines.id_of("batch", 1) != lines.id_of("other", 1)


def test_lines_are_read_with_bounded_memory(tmp_path: Path) -> None:
    file = tmp_path / "in"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\n  \n" + b"x" * 5_000_000 + b"\ntwelve letters\r\nlast")
    with LineReader(file, max_bytes=14) as reader:
        found = list(reader)
    assert [(line.number, line.raw, line.is_too_long) for line in found] == [
        (1, b"one", False), (4, b"", True), (5, b"twelve letters", False), (6, b"last", False),
    ]  # fmt: skip
    assert found[1].size >= 5_000_000
    assert found[-1].end == file.stat().st_size
    for line in found[:-1]:
        with LineReader(file, max_bytes=14, number=line.number, offset=line.end) as reader:
            assert list(reader) == found[found.index(line) + 1 :]


def test_a_journal_is_cut_to_its_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path, (ANSWERS, "errors"))
    journal.commit(Progress(number=1, offset=10, completed=1), {ANSWERS: [b"a\n"]})
    journal.commit(Progress(number=2, offset=20, completed=1, failed=1), {"errors": [b"e\n"]})
    journal.close()
    with (tmp_path / ANSWERS).open("ab") as file:
        file.write(b"what came after the rec")
    (tmp_path / ".progress.json.new").write_bytes(b"{half")
    again = Journal(tmp_path, (ANSWERS, "errors"))
    assert (again.progress.number, again.progress.offset, again.progress.completed, again.progress.failed) == (2, 20, 1, 1)
    again.commit(Progress(number=3, offset=30, completed=2, failed=1), {ANSWERS: [b"b\n"]})
    again.close()
    assert ((tmp_path / ANSWERS).read_bytes(), (tmp_path / "errors").read_bytes()) == (b"a\nb\n", b"e\n")
    (tmp_path / "progress.json").write_bytes(b"{half")
    with pytest.raises(ValueError, match="cannot be read"):
        read_progress(tmp_path)


def test_J16_a_journal_whose_answers_have_gone_begins_anew(tmp_path: Path) -> None:
    for harm in (lambda file: file.unlink(), lambda file: file.write_bytes(b"a")):  # pyright: ignore[reportUnknownLambdaType]
        journal = Journal(tmp_path, (ANSWERS,))
        journal.commit(Progress(number=2, offset=20, completed=2), {ANSWERS: [b"a\n", b"b\n"]})
        journal.close()
        harm(tmp_path / ANSWERS)
        again = Journal(tmp_path, (ANSWERS,))
        again.close()
        assert again.progress == read_progress(tmp_path) == Progress()
        assert (tmp_path / ANSWERS).read_bytes() == b""


def test_J16_a_run_that_is_killed_in_its_last_step_gives_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, identity = tmp_path / "out", partial.RunIdentity(version="1", input_sha256="", model="m", revision="", options={})
    starts: list[int] = []

    def run_once() -> None:
        with partial.partial_run(out, identity, restart=False) as journal:
            starts.append(journal.progress.number)
            if not journal.progress.number:
                journal.commit(Progress(number=1, offset=2, completed=1), {partial.ANSWERS: [b"a\n"]})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for deletes in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(partial, "rmtree", killed)
            with pytest.raises(KeyboardInterrupt):
                run_once()
        assert out.read_bytes() == b"a\n"
        if deletes:
            out.unlink()
        run_once()
        assert list(tmp_path.iterdir()) == [out]
        assert out.read_bytes() == b"a\n"
    assert starts == [0, 1, 0, 0]


def run_file(folder: Path, file: Path, answer: Any, **options: Any) -> bool:
    journal = Journal(folder, (ANSWERS,))
    start = journal.progress
    try:
        with LineReader(file, max_bytes=1000, number=start.number, offset=start.offset) as reader:
            return asyncio.run(run_lines(reader, journal, answer, window=Window(4, 100), **options))
    finally:
        journal.close()


def test_answers_keep_the_order_of_the_lines_and_few_run_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "in"
    file.write_bytes(b"".join(b"%d\n" % number for number in range(50)))
    running: set[int] = set()
    most = 0

    async def answer(line: Line) -> Written:
        nonlocal most
        running.add(line.number)
        most = max(most, len(running))
        await asyncio.sleep(0.001 * (line.number * 7 % 5))
        running.discard(line.number)
        return Written(ANSWERS, line.raw, line.number % 10 != 0)

    assert run_file(tmp_path, file, answer)
    assert (tmp_path / ANSWERS).read_bytes() == file.read_bytes()
    assert most == 4
    assert (read_progress(tmp_path).completed, read_progress(tmp_path).failed) == (45, 5)


def test_large_answers_run_few_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "in"
    file.write_bytes(b"".join(b"%d\n" % number for number in range(60)))
    running: set[int] = set()
    most: dict[bool, int] = {False: 0, True: 0}

    async def answer(line: Line) -> Written:
        running.add(line.number)
        is_late = line.number > 50
        most[is_late] = max(most[is_late], len(running))
        await asyncio.sleep(0.001)
        running.discard(line.number)
        return Written(ANSWERS, b"x" * (2 * 2**20 if line.number > 30 else 10), good=True)

    journal = Journal(tmp_path, (ANSWERS,))
    with LineReader(file, max_bytes=1000) as reader:
        assert asyncio.run(run_lines(reader, journal, answer, window=Window(16, 1000, 4 * 2**20)))
    journal.close()
    assert (most[False], most[True]) == (16, 2)
    assert read_progress(tmp_path).completed == 60


def test_J16_a_run_that_breaks_goes_on_without_a_line_lost_or_doubled(tmp_path: Path) -> None:
    file = tmp_path / "in"
    file.write_bytes(b"".join(b"%d\n" % number for number in range(40)))
    tries = 0

    async def answer(line: Line) -> Written:
        nonlocal tries
        tries += 1
        await asyncio.sleep(0)
        if tries % 9 == 0:
            raise RuntimeError("broken")
        return Written(ANSWERS, line.raw, good=True)

    for _ in range(40):
        try:
            done = run_file(tmp_path, file, answer)
        except RuntimeError:
            continue
        assert done
        break
    assert (tmp_path / ANSWERS).read_bytes() == file.read_bytes()
    assert read_progress(tmp_path).completed == 40


def test_a_run_stops_soon_and_keeps_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "in"
    file.write_bytes(b"".join(b"%d\n" % number for number in range(3)))

    async def answer(line: Line) -> Written:
        await asyncio.sleep(0 if line.number == 1 else 60)
        return Written(ANSWERS, line.raw, good=True)

    async def stops() -> bool:
        return True

    assert not run_file(tmp_path, file, answer, stops=stops)
    assert (tmp_path / ANSWERS).read_bytes() == b"0\n"
    assert read_progress(tmp_path).number == 1


def test_a_write_that_is_cancelled_ends_before_its_file_is_closed() -> None:
    ended: list[str] = []

    def write() -> None:
        time.sleep(0.1)
        ended.append("written")

    async def main() -> None:
        task = asyncio.ensure_future(in_thread(write))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        ended.append("closed")

    asyncio.run(main())
    assert ended == ["written", "closed"]
