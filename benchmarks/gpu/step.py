"""One step in this process: its rows go into a file as they come. `__main__` starts it."""

import sys
import traceback
from importlib import import_module
from pathlib import Path

import orjson
from setting import ROOT, NeedsGpu, Setting

sys.path[1:1] = [str(ROOT / "benchmarks"), str(ROOT / "tests/support")]


def main() -> int:
    module, name, out, rows, *small = sys.argv[1:]
    with Path(rows).open("wb", buffering=0) as file:
        try:
            found = import_module(module).run(name, Setting(Path(out), bool(small)))
            file.writelines(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n" for row in found)
        except NeedsGpu as error:
            file.writelines(orjson.dumps(row) + b"\n" for row in ({"reason": str(error)}, {"status": "needs a GPU"}))
        except Exception as error:  # the other steps run all the same
            traceback.print_exc()
            file.write(orjson.dumps({"status": f"{type(error).__name__}: {error}"}) + b"\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
