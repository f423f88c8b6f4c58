"""Process of the `whimbrel` command: its first moments, in which a signal may come, and its end.

The process ends without finalising the interpreter. Threads of native libraries and of the log run until the end. One that
wants the interpreter then, or holds the lock of a stream, could abort the process and change its exit code.
"""

import atexit
import os
import signal
import sys
from typing import Final, NoReturn

_INTERRUPTED: Final = 130


def main() -> NoReturn:
    """Run the command line and end the process with its exit code."""
    if sys.platform != "win32":  # whatever the parent has set; ignored signals (nohup) stay so
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # children can be waited for
    serves = sys.argv[1:2] == ["serve"]
    for name in (signal.SIGINT, signal.SIGTERM) if serves else (signal.SIGINT,):
        if signal.getsignal(name) != signal.SIG_IGN:
            # A server that has no child yet ends as it would later. The supervisor replaces these handlers.
            signal.signal(name, lambda _signal, _frame: os._exit(0 if serves else _INTERRUPTED))
    from whimbrel.cli import main as command

    if not serves and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        command.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # noqa: T201
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    _end(code)


def _end(code: int) -> NoReturn:
    try:
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        if not sys.stdout.closed:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader left
        pass
    except OSError as error:
        print(f"error: cannot write stdout: {error.strerror or error}.", file=sys.stderr)  # noqa: T201
        code = 1
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
