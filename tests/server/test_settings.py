from __future__ import annotations

import inspect
from typing import Any

import pytest

from whimbrel.cli.main import serve
from whimbrel.errors import SetupError
from whimbrel.server.settings import Settings
from whimbrel.server.settings_table import TABLE, read_settings, stated

MOST_FLAGS = 15


def test_help_shows_few_flags_and_the_old_ones_still_work() -> None:
    hints = {name: each.annotation.__metadata__[0] for name, each in inspect.signature(serve).parameters.items()}
    assert len([name for name, hint in hints.items() if name != "models" and not hint.hidden]) <= MOST_FLAGS
    assert {key for key, row in TABLE.items() if row.group != "HTTP"} <= hints.keys()


def test_each_setting_is_stated_once() -> None:
    assert read_settings({}, (), {}) == Settings()
    assert all(row.text.endswith(".") and row.group for row in TABLE.values())
    for key, row in TABLE.items():
        assert row.variable == f"WHIMBREL_{key.upper()}"
        assert getattr(Settings(), key) == row.default


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("port", "9000", 9000), ("workers", "3.0", 3), ("otel", "true", True), ("playground", "0", False), ("drain_timeout", "0", 0.0),
        ("allowed_host", "a.example, b.example", ("a.example", "b.example")), ("allowed_host", '["a,b"]', ("a,b",)),
        ("served_name", "a,b", ("a,b",)), ("served_name", '["a,b", "c"]', ("a,b", "c")), ("api_key", " k, 1", (" k, 1",)),
        ("log_format", "json", "json"), ("chunked_prefill", "false", False),
    ],
)  # fmt: skip
def test_variables_and_assignments_are_read_alike(key: str, text: str, value: Any) -> None:
    assert getattr(read_settings({}, (), {TABLE[key].variable: text}), key) == value
    assert getattr(read_settings({}, [f"{key}={text}"], {}), key) == value


def test_limits_of_connections_are_settings_too() -> None:
    assert read_settings({}, ["max_headers=7"], {"WHIMBREL_HEADER_TIMEOUT": "75"}).header_timeout == 75
    assert read_settings({}, ["max_headers=7"], {"WHIMBREL_MAX_HEADERS": "8"}).max_headers == 7


def test_a_flag_goes_before_a_variable() -> None:
    environ = {"WHIMBREL_PORT": "1", "WHIMBREL_HOST": "::1", "WHIMBREL_GUARDS": '{"max_body_bytes": 5}'}
    found = stated({"port": 2, "uds": None, "served_name": []}, ["max_length=7"], environ)
    assert found == {
        "port": (2, "--port"),
        "host": ("::1", "WHIMBREL_HOST"),
        "max_length": (7, "--set max_length"),
        "max_body_bytes": (5, "WHIMBREL_GUARDS"),
    }
    assert stated({}, (), environ | {"WHIMBREL_MAX_BODY_BYTES": "6"})["max_body_bytes"] == (6, "WHIMBREL_MAX_BODY_BYTES")


def test_the_key_of_a_client_is_no_key_of_a_server_with_a_file() -> None:
    environ = {"WHIMBREL_API_KEY": "a"}
    assert read_settings({}, (), environ).api_key == ("a",)
    assert read_settings({"api_key_file": "/keys"}, (), environ).api_key == ()
    assert read_settings({}, (), environ | {"WHIMBREL_API_KEY_FILE": "/keys"}).api_key == ()


def test_the_port_that_kubernetes_sets_is_no_port() -> None:
    assert read_settings({}, (), {"WHIMBREL_PORT": "tcp://10.0.0.1:8000"}).port == 8000


@pytest.mark.parametrize(
    ("environ", "assignments", "says"),
    [
        ({"WHIMBREL_PORT": "x"}, [], "WHIMBREL_PORT is 'x'; it takes a whole number from 0 up to 65535"),
        ({"WHIMBREL_PORT": "65536"}, [], "WHIMBREL_PORT is '65536'"), ({"WHIMBREL_PORT": "1.5"}, [], "a whole number"),
        ({"WHIMBREL_OTEL": "yes"}, [], "true or false"), ({"WHIMBREL_LOG_FORMAT": "xml"}, [], "one of plain, json"),
        ({"WHIMBREL_STEP_TIMEOUT": "nan"}, [], "a number from 0.1"), ({"WHIMBREL_DRAIN_TIMEOUT": "inf"}, [], "a number from 0 up to"),
        ({"WHIMBREL_WORKERS": " "}, [], "WHIMBREL_WORKERS is empty"), ({"WHIMBREL_API_KEY": ""}, [], "WHIMBREL_API_KEY is empty"),
        ({"WHIMBREL_API_KEY_FILE": ""}, [], "WHIMBREL_API_KEY_FILE is empty"), ({"WHIMBREL_ADAPTER": "[a"}, [], "no array"),
        ({}, ["port"], "--set port has no value"), ({"WHIMBREL_MAX_QUEUE_TOKENS": str(2**63)}, [], "below 2"),
        ({}, ["prot=1"], "'prot' is no key.*"), ({}, ["port=1", "port=2"], "--set port is given twice"),
        ({}, ["max_headers=0"], "above 0"), ({}, ["=1"], "'' is no key"),
    ],
)  # fmt: skip
def test_wrong_values_name_their_source(environ: dict[str, str], assignments: list[str], says: str) -> None:
    with pytest.raises(SetupError, match=says):
        read_settings({}, assignments, environ)


def test_a_setting_is_given_once_on_a_line() -> None:
    with pytest.raises(SetupError, match="port is given twice, by its flag and by --set"):
        read_settings({"port": 1}, ["port=2"], {})
    with pytest.raises(SetupError) as error:
        read_settings({}, ["max_lenght=2"], {})
    assert error.value.hint == "did you mean max_length?"
