"""Course of `whimbrel top`: one view, or one for each interval, on the screen or as JSON."""

import asyncio
import os
import signal
import sys
import termios
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from time import monotonic
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from whimbrel.cli.console import screen_width
from whimbrel_bench.top.table import render
from whimbrel_bench.top.watch import Watch, open_http, total


async def run(urls: Sequence[str], api_key: str | None, *, verify: bool, interval: float, once: bool, as_json: bool) -> int:
    """Watch the servers. Return the exit code. Raises SetupError."""
    async with open_http(urls, api_key, verify=verify) as http:
        watches = [Watch(url, http) for url in urls]
        screen = Console(highlight=False)
        if as_json and not once:
            await _watch(watches, interval, lambda: _print_json(watches, interval))
        elif once or not screen.is_terminal or screen.is_dumb_terminal:
            await asyncio.gather(*(each.poll() for each in watches))
            await asyncio.sleep(interval)
            await asyncio.gather(*(each.poll() for each in watches))
            if as_json:
                _print_json(watches, interval)
            else:
                plain = Console(highlight=False, width=screen_width())
                plain.print(_view(watches, plain.width))
            return 0 if all(each.figures.state == "up" for each in watches) else 1
        else:
            await _show(watches, interval, screen)
    return 0


async def _watch(watches: Sequence[Watch], interval: float, show: Callable[[], None]) -> None:
    """Poll all servers in each interval, and call `show` once they have answered or the interval is over."""
    polls: dict[int, asyncio.Task[None]] = {}
    try:
        while True:
            begin = monotonic()
            for number, each in enumerate(watches):
                if number not in polls:
                    polls[number] = asyncio.create_task(each.poll())
            await asyncio.wait(polls.values(), timeout=interval)
            for number in [number for number, poll in polls.items() if poll.done()]:
                polls.pop(number).result()
            show()
            await asyncio.sleep(begin + interval - monotonic())
    finally:
        for poll in polls.values():
            poll.cancel()


async def _show(watches: Sequence[Watch], interval: float, screen: Console) -> None:
    """Show the servers on the alternate screen until q is pressed."""
    loop = asyncio.get_running_loop()
    title = Text(f"whimbrel top, every {interval:g} s; q ends", style="dim")

    def draw() -> None:
        live.update(Group(title, Text(), _view(watches, screen.width)), refresh=True)

    with _keys() as ended, Live(console=screen, screen=True, auto_refresh=False) as live:
        draw()
        loop.add_signal_handler(signal.SIGWINCH, draw)
        tasks = asyncio.create_task(_watch(watches, interval, draw)), asyncio.create_task(ended.wait())
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)
            for task in tasks:
                task.cancel()
    for task in done:
        task.result()


@contextmanager
def _keys() -> Generator[asyncio.Event]:
    """Read keys of the terminal without echo. The event is set when q is pressed. Ctrl-Z does nothing meanwhile."""
    ended = asyncio.Event()
    if not sys.stdin.isatty():
        yield ended
        return
    number, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read() -> None:
        keys = os.read(number, 1024)
        if not keys:  # the terminal is gone
            loop.remove_reader(number)
        if not keys or b"q" in keys.lower():
            ended.set()

    before = termios.tcgetattr(number)
    modes = termios.tcgetattr(number)
    modes[3] &= ~(termios.ECHO | termios.ICANON)
    modes[6][termios.VSUSP] = os.fpathconf(number, "PC_VDISABLE").to_bytes()
    termios.tcsetattr(number, termios.TCSADRAIN, modes)
    loop.add_reader(number, read)
    try:
        yield ended
    finally:
        loop.remove_reader(number)
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(number, termios.TCSADRAIN, before)


def _view(watches: Sequence[Watch], width: int) -> RenderableType:
    return render([each.figures for each in watches], total(watches), width=width)


def _print_json(watches: Sequence[Watch], interval: float) -> None:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    servers = [each.figures for each in watches]
    document: dict[str, Any] = {"time": now, "interval": interval, "servers": servers, "total": total(watches)}
    sys.stdout.buffer.write(msgspec.json.encode(document) + b"\n")
    sys.stdout.buffer.flush()
