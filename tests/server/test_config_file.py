"""The file of settings: what each key means, which source goes before which, and one clear line for every fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from whimbrel.cli.serve_options import check_config, models_to_serve
from whimbrel.errors import SetupError
from whimbrel.server.config_file import SECTIONS, TABLES, Config, read_config
from whimbrel.server.keys import hash_of
from whimbrel.server.settings import ModelTable, Settings, keep_seconds
from whimbrel.server.settings_table import MODEL_TABLE, OF_MODELS, TABLE

HASH = f"sha256:{'0' * 64}"
EXAMPLE = """
[server]
port = 9000
api_key_file = "secrets/keys"
allowed_host = ["a.example", "b.example"]

[limits]
max_body_bytes = 1_000_000
step_timeout = 30

[defaults]
dtype = "float32"
max_length = 256

[models.e5]
source = "intfloat/multilingual-e5-small"
revision = "main"
names = ["text-embedding-3-small"]
dtype = "bfloat16"
replicas = 2
prompts = { query = "query: ", none = "" }
adapters = { law = "adapters/law" }
keep = "10m"

[models."here/it is"]
source = "local"

[models.packaged]
"""


def read(folder: Path, text: str | bytes, *assignments: str, given: dict[str, Any] | None = None, **environ: str) -> Config:
    file = folder / "w.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_config(file, given or {}, assignments, environ)


def refusal(folder: Path, text: str | bytes, *assignments: str, **environ: str) -> str:
    """Return error and hint of a file that is read as `whimbrel config check` does."""
    with pytest.raises(SetupError) as error:
        check_config(read(folder, text, *assignments, **environ), lambda _: None)
    lines = f"{error.value}\n{error.value.hint or ''}".replace(f"{folder}/", "")
    assert all(line.isprintable() and len(line) < 400 for line in lines.splitlines())
    return lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("adapters/law", "local", "secrets"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "secrets/keys").write_text("k\n")
    return tmp_path


def test_every_key_of_a_file(folder: Path) -> None:
    config = read(folder, EXAMPLE)
    defaults: dict[str, Any] = {"dtype": "float32", "max_length": 256}
    assert config.settings == Settings(
        port=9000, api_key_file=folder / "secrets/keys", allowed_host=("a.example", "b.example"), max_body_bytes=1_000_000,
        step_timeout=30.0, **defaults,
    )  # fmt: skip
    assert config.models == {
        "e5": ModelTable(
            source="intfloat/multilingual-e5-small", revision="main", names=("text-embedding-3-small",), dtype="bfloat16",
            max_length=256, replicas=2, prompts={"query": "query: ", "none": ""}, adapters={"law": folder / "adapters/law"},
            keep="10m",
        ),
        "here/it is": ModelTable(source=str(folder / "local"), **defaults),
        "packaged": ModelTable(**defaults),
    }  # fmt: skip
    assert config.models["e5"].model == "intfloat/multilingual-e5-small@main"
    assert config.models["packaged"].model is None
    assert config.sources["models", "e5", "dtype"] == f"{folder}/w.toml:19"
    assert config.sources["models", "e5", "max_length"] == config.sources["max_length",] == f"{folder}/w.toml:13"
    assert ("models", "packaged", "device") not in config.sources


@pytest.mark.parametrize(("text", "seconds"), [("always", None), ("0s", 0), ("90s", 90), ("2h", 7200), ("1d", 86400)])
def test_times_to_keep_a_model(text: str, seconds: float | None) -> None:
    assert keep_seconds(text) == seconds


def test_the_order_of_sources(folder: Path) -> None:
    """Flag or --set, then variable, then the model's table, then [defaults], then the default."""
    text = "[server]\nport = 1\nhost = 'a'\n[defaults]\ndtype = 'float32'\nmax_length = 9\n[models.a]\ndtype = 'int8'\n[models.b]\n"

    def dtypes(config: Config) -> list[str]:
        return [config.settings.dtype, *(table.dtype for table in config.models.values())]

    assert dtypes(read(folder, text)) == ["float32", "int8", "float32"]
    with_variable = read(folder, text, WHIMBREL_DTYPE="bfloat16", WHIMBREL_PORT="2")
    assert dtypes(with_variable) == ["bfloat16"] * 3
    assert with_variable.sources["models", "a", "dtype"] == with_variable.sources["dtype",] == "WHIMBREL_DTYPE"
    config = read(folder, text, "port=3", given={"dtype": "float16"}, WHIMBREL_DTYPE="bfloat16", WHIMBREL_PORT="2")
    assert dtypes(config) == ["float16"] * 3
    assert (config.settings.port, config.settings.host, config.models["a"].max_length) == (3, "a", 9)
    assert (config.sources["port",], config.sources["dtype",]) == ("--set port", "--dtype")


def test_the_file_is_the_one_that_is_given_or_else_that_of_the_variable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "one.toml").write_text("[server]\nport = 1\n")
    (folder / "two.toml").write_text("[server]\nport = 2\nuds = 'socket'\n")
    environ = {"WHIMBREL_CONFIG": str(folder / "two.toml")}
    assert read_config(None, {}, (), environ).settings.port == 2
    assert read_config(folder / "one.toml", {}, (), environ).settings.port == 1
    assert read_config(None, {}, (), {}) == Config(settings=Settings())
    with pytest.raises(SetupError, match="WHIMBREL_CONFIG is empty"):
        read_config(None, {}, (), {"WHIMBREL_CONFIG": " "})
    monkeypatch.chdir(folder / "local")
    config = read_config(Path("../two.toml"), {}, (), {})
    assert config.sources["port",] == "../two.toml:2"
    assert config.settings.uds == folder / "local/../socket"


def test_two_readings_are_equal_if_they_say_the_same(folder: Path) -> None:
    first = read(folder, EXAMPLE)
    assert read(folder, f"# moved\n\n{EXAMPLE}") == first
    other = read(folder, EXAMPLE.replace('"query: "', '"search: "'))
    assert other != first
    assert [name for name in first.models if first.models[name] != other.models[name]] == ["e5"]
    assert other.settings == first.settings


@pytest.mark.parametrize("text", ["", "\n# nothing\n", b"\xef\xbb\xbf", "[server]", "[models]\n[keys]\n[limits]\n[defaults]\n"])
def test_an_empty_file_says_nothing(folder: Path, text: str | bytes) -> None:
    config = read(folder, text)
    assert config == Config(settings=Settings())
    check_config(config, lambda _: None)


def test_every_setting_has_one_place_in_a_file() -> None:
    assert sorted(key for rows in SECTIONS.values() for key in rows) == sorted(key for key, row in TABLE.items() if row.section)
    assert {key for key, row in TABLE.items() if row.section is None} == {
        "served_name", "adapter", "api_key", "ssl_keyfile_password",
    }  # fmt: skip
    assert all(f"{key}_file" in TABLE for key, row in TABLE.items() if row.is_secret)
    assert SECTIONS["defaults"] == OF_MODELS
    assert all(row.text.endswith(".") for row in MODEL_TABLE.values())
    assert set(TABLES) == {"server", "limits", "defaults", "models", "keys"}


WRONG: list[tuple[str, str, str]] = [
    # unknown
    ("[sever]\nport = 1", "w.toml:1: sever is not known.", "did you mean server?"),
    ('"" = 1', 'w.toml:1: "" is not known.', ""), ("[xyz]", "w.toml:1: xyz is not known.", "the tables are [server]"),
    ("port = 1", "w.toml:1: port stands in no table.", "port stands in [server]"),
    ("dtype = 'int8'", "stands in no table", "dtype stands in [defaults] or [models.NAME]"),
    ("[server]\nprot = 1", "w.toml:2: server.prot is not known.", "did you mean port?"),
    ("[server]\nPORT = 1", "server.PORT is not known.", "did you mean port?"),
    ("[server]\napi-key-file = 'x'", "server.api-key-file is not known", "did you mean api_key_file?"),
    ("[server]\n\ndtype = 'int8'", "w.toml:3: server.dtype is no key of [server].", "dtype stands in [defaults] or [models.NAME]"),
    ("[limits]\nport = 1", "limits.port is no key of [limits].", "port stands in [server]"),
    ("[server]\nmax_body_byte = 1", "server.max_body_byte is not known", "max_body_bytes stands in [limits]"),
    ("[defaults]\nsource = 'x/y'", "defaults.source is no key of [defaults]", "[models.NAME] has source"),
    ("[defaults]\nserved_name = 'x'", "defaults.served_name is no key", "[models.NAME] has names"),
    ("[models.a]\nadapter = ['x']", "models.a.adapter is no key of [models.a]", "[models.NAME] has adapters"),
    ("[models.a]\nd_type = 'int8'", "w.toml:2: models.a.d_type is not known", "did you mean dtype?"),
    ("[models.a]\nqqqq = 1", "models.a.qqqq is not known", "whimbrel config show lists all keys"),
    ("[models]\na = { dtipe = 'int8' }", "w.toml:2: models.a.dtipe is not known", "did you mean dtype?"),
    ("[models.e5-v1.5]\nsource = 'a/b'", "w.toml:1: models.e5-v1.5 is not known", 'a name with dots has quotes: [models."e5-v1.5"]'),
    ("[server]\napi_key = 'k'", "w.toml:2: server.api_key is a secret, which no file of settings holds", 'api_key_file = "PATH"'),
    ("[server]\nssl_keyfile_password = 'p'", "is a secret", 'ssl_keyfile_password_file = "PATH"'),
    # of another type
    ("[server]\nport = '9000'", "w.toml:2: server.port is '9000'; it takes a whole number from 0 up to 65535.", "Port to listen"),
    ("[server]\nport = 65536", "server.port is 65536; it takes", ""), ("[server]\nport = true", "server.port is True; it takes", ""),
    ("[server]\nport = 1.5", "server.port is 1.5; it takes a whole number", ""), ("[server]\nhost = 1", "server.host is 1; it takes text", ""),
    ("[server]\nhost = ' '", "server.host is empty", "leave it out"), ("[server]\nuds = ''", "server.uds is empty", ""),
    ("[server]\nuds = 1", "server.uds is 1; it takes a path", ""), ("[server]\notel = 'yes'", "it takes true or false", ""),
    ("[server]\nallowed_host = 'a'", "server.allowed_host is 'a'; it takes a list of texts", ""),
    ("[server]\nallowed_host = [\n1]", "w.toml:2: server.allowed_host is [1]", ""),
    ("[server]\nlog_format = 'xml'", "it takes one of plain, json", ""), ("[limits]\nstep_timeout = nan", "it takes a number from 0.1", ""),
    ("[limits]\nmax_queue_tokens = 9223372036854775808", "below 2**63", ""), ("[limits]\ndrain_timeout = 1979-05-27", "it takes a number", ""),
    ("[limits]\nmax_headers = 0", "it takes a whole number above 0", ""), ("server = 1", "w.toml:1: server is 1; it takes a table", "[server]"),
    ("[[server]]\nport = 1", "server is a list; it takes a table", ""), ("[models]\ne5 = 'a/b'", "models.e5 is 'a/b'; it takes a table; a model", "[models.e5]"),
    ("[[models]]\nsource = 'a/b'", "w.toml:1: models is a list; it takes a table; a model is a table of its own, [models.NAME]", ""),
    ("[models]\nsource = 'a/b'", "models.source is 'a/b'; it takes a table; a model is a table of its own", ""),
    ("models = 3", "models is 3; it takes a table", ""), ("[keys]\na = 1", "keys.a is no table", ""),
    ("[models.a]\ndtype = 'fp16'", "w.toml:2: models.a.dtype is 'fp16'; it takes one of auto, float32, bfloat16, float16, int8", ""),
    ("[models.a]\ndevice = 'gpu'", "it takes text such as auto, cpu, cuda, cuda:1", ""),
    ("[models.a]\npooling = 'best'", "it takes one of cls, max", ""), ("[models.a]\nreranker = 'x'", "it takes one of qwen3", ""),
    ("[models.a]\nkeep = '10 minutes'", "models.a.keep is '10 minutes'; it takes text such as always, 90s, 10m", ""),
    ("[models.a]\nkeep = 600", "models.a.keep is 600; it takes text such as always", ""), ("[models.a]\nkeep = '-1s'", "it takes text such as", ""),
    ("[models.a]\nprompts = 'query: '", "it takes a table of texts", ""), ("[models.a.prompts]\nquery = 1", "w.toml:1: models.a.prompts is", ""),
    ("[models.a]\nmax_batch_tokens = 2000000", "up to 1048576", ""), ("[models.a]\nmax_length = 0", "a whole number from 1", ""),
    # models
    ("[models.a]\nnames = ['b']\n[models.b]", "w.toml:3: models.b: another model, or this one, has the name b already: models.a.names (", ""),
    ("[models.a]\nnames = ['c']\n[models.b]\nnames = ['x', 'c']", "w.toml:4: models.b.names: another model", "give every model names"),
    ("[models.a]\nnames = ['x', 'x']", "w.toml:2: models.a.names: another model, or this one, has the name x", ""),
    ("[models.a]\nnames = ['a']", "has the name a already: models.a (", ""), ("[models.a]\nnames = ['']", "models.a.names holds an empty text", ""),
    ('[models.""]', "w.toml:1: models.\"\": '' is no name of a model", ""), ('[models." a"]', "' a' is no name", ""),
    ("[models.a]\nsource = ''", "models.a.source is empty", ""), ("[models.a]\nsource = './none'", "w.toml:2: models.a.source: there is no folder ", "a path is relative to the file's folder"),
    ("[models.a]\nsource = '/none'", "there is no folder /none", ""), ("[models.a]\nsource = 'e5'", "there is no folder", "a hub id looks like owner/name"),
    ("[models.a]\nsource = 'w.toml'", "there is no folder", ""), ("[models.a]\nsource = 'a/b/c'", "there is no folder", ""),
    ("[models.a]\nrevision = 'v1'", "w.toml:2: models.a.revision is stated beside the packaged model", "owner/name"),
    ("[models.a]\nsource = 'local'\nrevision = 'v1'", "w.toml:3: models.a.revision is stated beside a folder", ""),
    ("[models.a]\nsource = 'a/b@c'\nrevision = 'v1'", "is stated beside a/b@c, which names one", ""),
    ("[models.a]\nadapters = { x = 'adapters/none' }", "w.toml:2: models.a.adapters.x: there is no folder ", ""),
    ("[models.a.adapters]\nx = 'none'", "w.toml:2: models.a.adapters.x: there is no folder ", ""),
    ('[models.a.adapters]\n\nx = "nul\\u0000"', "w.toml:1: models.a.adapters holds a control character", ""),
    ('[models.a]\nsource = "a/b\\u0000"', "w.toml:2: models.a.source holds a control character", ""),
    ('[server]\nuds = "a\\nb"', "server.uds holds a control character", ""), ('[models."a\\u0000"]', "is no name of a model", ""),
    ("[server]\nallowed_host = ['']", "w.toml:2: server.allowed_host holds an empty text", ""),
    ("[models.a]\nprompts = { '' = 'x' }", "models.a.prompts holds an empty text", ""),
    ("[models.a]\nsource = '~nouser/x'", "there is no folder ", ""), ("[server]\nuds = '~nouser/x'\nport = 'x'", "server.port is 'x'", ""),
    ("[models.a]\nsource = 'https://huggingface.co/a/b'", "there is no folder", "a hub id looks like owner/name"),
    ("[models.a]\nsource = 'a b/c'", "there is no folder", ""), ("[models.a]\nsource = 'a/b@'", "there is no folder", ""),
    ("[models.a]\nsource = 'a/b'\nrevision = '@x'", "models.a.revision is '@x'; it takes text such as main, v1.0, 5c38ec7c", ""),
    ("[server]\n" + "k" * 5000 + " = 1", 'w.toml:2: server."kkk', ""), ('["\\u001b[31m"]', 'w.toml:1: "\\u001b[31m" is not known', ""),
    ('[models."a\u202eb"]\nq = 1', 'w.toml:2: models."a\\u202eb".q is not known', ""),
    ("models = { a = {} }\n[models.b]", "w.toml:2: [models.b] is stated twice", "a table in braces is closed"),
    ("[models]\na = { dtype = 'int8', dtype = 'int8' }", "w.toml:2: dtype is stated twice", ""),
    ("[server]\nhost = 1979-05-27", "it takes text", ""), ("[server]\nallowed_host = [['a']]", "it takes a list of texts", ""),
    ("[server]\nport = " + "9" * 4000, "it takes a whole number", ""), ("a = " + "{a=" * 3000 + "1" + "}" * 3000, "nested too deeply", ""),
    ("[server]\nallowed_host = ['http://x']", "w.toml:2: allowed_host takes a host's name", ""), ("[server]\n\nroot_path = 'a b'", "w.toml:3: root_path takes a path", ""),
    ("[limits]\nmax_inflight_bytes = 1", "w.toml:2: max_inflight_bytes is 1, less than", ""),
    ("[server]\r\nport = 1\r\nprot = 2\r\n", "w.toml:3: server.prot is not known", "did you mean port?"),
    # files
    ("[server]\napi_key_file = 'none'", "cannot read the API keys in none", ""),
    ("[server]\nssl_certfile = 'c'\nssl_keyfile_password_file = 'none'", "cannot read the password of the TLS key in none", ""),
    ("[server]\nhf_token_file = 'local'", "cannot read the hub's token in local", ""),
    ("[keys.a]\nhash = 'sha256:'", "w.toml:2: keys.a.hash is no hash of a key", "whimbrel key --hash"),
    ("[keys.a]", "w.toml:1: keys.a has no hash", "whimbrel key NAME"),
    (f"[keys.a]\nhash = '{HASH}'\nmodel = ['x']", "w.toml:3: keys.a.model is not known", "did you mean models?"),
    (f"[keys.a]\nhash = '{HASH}'\nkey = 'secret'", "w.toml:3: keys.a.key is not known", "only their hashes"),
    (f"[keys.a]\nhash = '{HASH}'\nrequests_per_minute = 0", "w.toml:3: keys.a.requests_per_minute is 0; it takes", ""),
    (f"[keys.a]\nhash = '{HASH}'\n[keys.b]\nhash = '{HASH}'", "w.toml:3: keys.b and keys.a have the same hash", "make a key for each"),
    (f"[keys.a]\nhash = '{HASH}'\n[keys.a]", "w.toml:3: [keys.a] is stated twice", ""),
    (f"[models.e5]\n[keys.a]\nhash = '{HASH}'\nmodels = ['e6']", "the key a names the model e6, which is not served", "did you mean e5?"),
    (f"[keys.a]\nhash = '{HASH}'\nroutes = ['/v1/embedings']", "the key a names the route /v1/embedings, which is not served", "did you mean /v1/embeddings?"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says", "hint"), WRONG, ids=[text[:60] for text, _, _ in WRONG])
def test_a_fault_is_one_line_with_its_place(text: str, says: str, hint: str, folder: Path) -> None:
    message, _, hinted = refusal(folder, text).partition("\n")
    assert says in message
    assert hint in hinted


def test_a_folder_of_the_working_directory_is_not_taken_for_a_hub_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere/owner/name").mkdir(parents=True)
    monkeypatch.chdir(folder / "elsewhere")
    assert "owner/name is a folder of the working directory" in refusal(folder, "[models.a]\nsource = 'owner/name'")
    (folder / "owner/name").mkdir(parents=True)
    assert read(folder, "[models.a]\nsource = 'owner/name'").models["a"].source == str(folder / "owner/name")


def test_models_stand_in_one_place(folder: Path) -> None:
    config = read(folder, "[models.a]\n")
    with pytest.raises(SetupError, match=r"^o/m is given, and .*w\.toml has models of its own\.$") as error:
        models_to_serve(["o/m"], config)
    assert "[models.NAME]" in (error.value.hint or "")
    assert "WHIMBREL_SERVED_NAME is given" in refusal(folder, "[models.a]", WHIMBREL_SERVED_NAME="x")
    assert [each.model for each in models_to_serve(["o/m"], read(folder, "[defaults]\ndtype = 'int8'"))] == ["o/m"]


def test_models_are_served_as_their_tables_say(folder: Path) -> None:
    text = EXAMPLE.replace('keep = "10m"', "keep = '10m'\nmax_batch_tokens = 64\nsplit_long = true\ntokenizer = 'file'")
    first, second, third = models_to_serve((), read(folder, text, given={"adapter": ["e5:tax=/tax"]}))
    assert (first.model, first.num_replicas, first.keep_seconds) == ("intfloat/multilingual-e5-small@main", 2, 600.0)
    expected = {
        "served_name": "e5", "aliases": ("text-embedding-3-small",), "dtype": "bfloat16", "max_length": 256, "split_long": True,
        "adapters": {"law": str(folder / "adapters/law"), "tax": "/tax"}, "prompts": {"query": "query: ", "none": ""},
        "max_batch_tokens": 64, "tokenizer": "file", "max_request_tokens": 2**20,
    }  # fmt: skip
    assert {key: value for key, value in first.options.items() if key in expected} == expected
    assert (second.model, second.options.get("served_name"), second.options.get("dtype")) == (
        str(folder / "local"),
        "here/it is",
        "float32",
    )
    assert (third.model, third.options.get("aliases"), third.options.get("prompts")) == (None, (), {})


def test_the_variable_of_clients_is_no_key_beside_a_file_of_keys(folder: Path) -> None:
    text = "[server]\napi_key_file = 'secrets/keys'\n"
    assert read(folder, text, WHIMBREL_API_KEY="clients").settings.api_key == ()
    assert read(folder, text, "api_key=more").settings.api_key == ("more",)
    assert read(folder, "", WHIMBREL_API_KEY="a").settings.api_key == ("a",)
    config = read(folder, f"[keys.search]\nhash = '{HASH}'\nrequests_per_minute = 60\n", WHIMBREL_API_KEY="clients")
    assert config.settings.api_key == ()
    assert [(key.name, key.limits) for key in config.keys] == [("search", {"requests_per_minute": 60})]


def test_one_password_is_stated_once_and_later_sources_go_before(folder: Path) -> None:
    text = "[server]\nssl_keyfile_password_file = 'p'\n"
    config = read(folder, text, WHIMBREL_SSL_KEYFILE_PASSWORD="x")
    assert (config.settings.ssl_keyfile_password, config.settings.ssl_keyfile_password_file) == ("x", None)
    config = read(folder, "", "ssl_keyfile_password_file=p", WHIMBREL_SSL_KEYFILE_PASSWORD="x")
    assert (config.settings.ssl_keyfile_password, config.settings.ssl_keyfile_password_file) == (None, Path("p"))
    with pytest.raises(SetupError, match="state one password"):
        read(folder, "", "ssl_keyfile_password_file=p", "ssl_keyfile_password=x")


def test_a_file_of_ten_thousand_keys(folder: Path) -> None:
    models = "".join(f"[models.m{number}]\nsource = 'o/m{number}'\nmax_length = {number + 1}\n" for number in range(5000))
    config = read(folder, models)
    assert len(config.models) == 5000
    assert config.sources["models", "m4999", "max_length"].endswith(":15000")
    text = f"{models}[models.m5000]\nnames = ['m1']\n"
    assert "w.toml:15002: models.m5000.names: another model" in refusal(folder, text)


@pytest.mark.parametrize(
    ("more", "warns"), [("", True), ("routes = ['/v1/rerank']", False), (f"[keys.b]\nhash = '{hash_of('b')}'", False)]
)
def test_keys_that_open_nothing_for_clients_are_told(more: str, warns: bool, folder: Path) -> None:
    warnings: list[str] = []
    check_config(read(folder, f"[keys.a]\nhash = '{hash_of('a')}'\nadmin = true\n{more}"), warnings.append)
    assert [text.startswith("no key opens the routes of clients") for text in warnings] == [True] * warns
