"""Security of our own code and its dependencies: calls and imports that are forbidden, and versions with known holes."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import whimbrel

# What our own code never does

SOURCE = Path(whimbrel.__file__).parent


NEVER_IMPORTED = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "imp", "code", "codeop", "runpy", "xmlrpc",
    "multiprocessing", "concurrent.futures.process", "jinja2", "yaml", "xml", "zipimport",
}  # fmt: skip


NEVER_CALLED = {"eval", "exec", "compile", "__import__", "execfile", "breakpoint"}


NEVER_METHODS = {
    "system", "popen", "import_module", "import_from_string", "unsafe_load", "load_module", "exec_module", "set_start_method",
    "create_subprocess_shell", "from_pretrained",
}  # fmt: skip


ALLOWED = {
    "__init__.py": [".import_module"],  # of what its own table names
    "server/pages/reference.py": ["jinja2"],  # a template of our own, which writes HTML and escapes all that it is given
    "checkpoint/chat_template.py": ["jinja2", "jinja2.TemplateError", "jinja2.meta", "jinja2.nodes", "jinja2.ext",
                         "jinja2.ext.loopcontrols", "jinja2.sandbox", "jinja2.sandbox.ImmutableSandboxedEnvironment"],
    "engine/engine.py": ["importlib.import_module"],  # of what the environment of the process names
    "model/hf.py": ["hf.AutoConfig.from_pretrained", "hf.AutoModel.from_pretrained"],
    "checkpoint/torch_zip.py": ["pickle"],
    "ray/embed.py": ["pickle"],  # written only, as a key
    "ray/modules.py": [".import_module"],  # of Ray and its parts
    "stores/kinds.py": [".import_module"],  # of what its own table names
    "stores/modules.py": [".import_module"],  # of clients that the modules of that table name
}  # fmt: skip
"""Calls that some modules may make; see test_H16_what_is_allowed_is_harmless."""


def offences(code: str) -> list[str]:
    """Return the calls of a module that are forbidden."""
    found: list[str] = []
    for node in ast.walk(ast.parse(code)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        found += [name for name in names if name in NEVER_IMPORTED or name.split(".")[0] in NEVER_IMPORTED]
        if isinstance(node, ast.Call):
            found += _calls(node)
    return found


def _calls(node: ast.Call) -> list[str]:
    said = {word.arg: word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)}
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    owner = ast.unparse(node.func).rpartition(".")[0]
    wrong = {
        name in NEVER_CALLED and not owner,
        name in NEVER_METHODS,
        name == "load" and owner == "torch" and said.get("weights_only") is not True,
        name == "load" and owner in ("np", "numpy") and said.get("allow_pickle") is not False,
        any(said.get(word) for word in ("trust_remote_code", "shell")),
    }
    return [f"{owner}.{name}"] if True in wrong else []


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_H16_no_module_runs_or_unpickles_data(path: Path) -> None:
    allowed = ALLOWED.get(path.relative_to(SOURCE).as_posix(), ())
    assert [each for each in offences(path.read_text(encoding="utf-8")) if each not in allowed] == []


def test_H16_what_is_allowed_is_harmless() -> None:
    """A sandbox for templates, no code and no pickles of checkpoints, and an unpickler that makes nothing but shapes."""
    template = (SOURCE / "checkpoint/chat_template.py").read_text(encoding="utf-8")
    assert "environment = ImmutableSandboxedEnvironment(" in template
    assert template.count("Environment(") == 1
    calls = [
        {word.arg: ast.unparse(word.value) for word in node.keywords}
        for node in ast.walk(ast.parse((SOURCE / "model/hf.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
    ]
    assert len(calls) == 2
    assert all(call["local_files_only"] == "True" and call["trust_remote_code"] == "False" for call in calls)
    assert [call.get("use_safetensors") for call in calls] == [None, "True"]
    unpickler = (SOURCE / "checkpoint/torch_zip.py").read_text(encoding="utf-8")
    assert unpickler.count("pickle.Unpickler") == 1
    assert "def find_class" in unpickler
    assert not re.search(r"pickle\.loads?\(", unpickler)
    assert {*re.findall(r"pickle\.(\w+)", (SOURCE / "ray/embed.py").read_text(encoding="utf-8"))} == {"dumps"}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from pickle import loads", "import jinja2.sandbox", "from multiprocessing import Pipe", "eval(x)", "exec(x)",
        "from concurrent.futures import process", "torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f)", "os.system(x)",
        "importlib.import_module(x)", "f(trust_remote_code=True)", "run(x, shell=True)", "Model.from_pretrained(x)", "__import__(x)",
    ],
)  # fmt: skip
def test_H16_the_check_finds_what_it_looks_for(code: str) -> None:
    assert offences(code)


# Dependencies

ROOT = Path(__file__).parents[2]


FLOORS = {
    "orjson": "3.9.15",  # CVE-2024-27454: deep nesting
    "starlette": "1.3.1",  # CVE-2026-48710, CVE-2026-54282, CVE-2026-54283: Host, limits
    "torch": "2.10",  # CVE-2025-32434, CVE-2026-24747: weights_only
}
"""The first versions without a known hole of the packages that `whimbrel[serve]` installs."""


ALSO = {"transformers": "5.3", "sentence-transformers": "5.2.1", "pillow": "12.2", "onnx": "1.21", "ray": "2.59", "h11": "0.16"}
"""The same of what may come with others, or with the tests."""


def declared() -> dict[str, Requirement]:
    """Return the requirements of both distributions, without each other."""
    found: list[Requirement] = []
    for file in (ROOT / "pyproject.toml", ROOT / "packages/whimbrel-bench/pyproject.toml"):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        lists = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
        found += [Requirement(line) for some in lists for line in some if not line.startswith("whimbrel")]
    return {requirement.name.lower(): requirement for requirement in found}


@pytest.mark.parametrize("name", FLOORS)
def test_H18_what_is_declared_excludes_versions_with_known_holes(name: str) -> None:
    floors = [Version(part.version) for part in declared()[name].specifier if part.operator in (">=", "==", "~=")]
    assert max(floors) >= Version(FLOORS[name])


def locked(file: str) -> dict[str, list[Version]]:
    """Return the versions of PyTorch and of each package in a lock file. There may be several, for different versions of Python."""
    versions: dict[str, list[Version]] = defaultdict(list)
    text = "".join((ROOT / "requirements" / name).read_text(encoding="utf-8") for name in (file, "torch.txt"))
    for name, version in re.findall(r"^([\w.-]+)==([^ ;\n]+)", text, re.MULTILINE):
        versions[name.lower().replace("_", "-")].append(Version(version))
    return dict(versions)


@pytest.mark.parametrize("file", ["serve.txt", "dev.txt"])
def test_H18_what_is_locked_has_no_known_hole(file: str) -> None:
    versions = locked(file)
    assert set(FLOORS) <= versions.keys()
    for name, floor in (FLOORS | ALSO).items():
        assert all(version >= Version(floor) for version in versions.get(name, [])), name


def test_H18_everything_declared_is_locked_at_a_version_that_it_allows() -> None:
    versions = locked("ray.txt") | locked("recipes.txt") | locked("dev.txt")
    for name, requirement in declared().items():
        assert versions[name], name
        assert all(version in requirement.specifier for version in versions[name]), name


def test_H18_everything_that_is_locked_has_a_hash() -> None:
    for file in ("serve.txt", "dev.txt"):
        text = (ROOT / "requirements" / file).read_text(encoding="utf-8")
        packages = re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]
        assert len(packages) > 40
        assert all("--hash=sha256:" in each for each in packages)
