"""Schemathesis against a real server: it generates requests from /openapi.json, right ones and wrong ones, and finds no answer
that the document does not describe. Status 5xx never comes, wrong requests are refused, and right ones are answered.

JSON Schema does not express every rule. EXCLUSIONS lists each refusal of a right request that is not a finding, and its reason.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from serving import Server

SECONDS = 240
"""The time of the run, which ends with the request that is under way."""
EXCLUSIONS = {
    "of the served model": (
        r"this model|no prompt |is no prompt|this server serves|this request asks for|out(side the| of) vocabulary"
        r"|are no multiple of 8|is for (dense|documents|texts|models|pairs)|pairs are compared|the vectors have"
        r"|must be a pair of two texts|must be a string or an array of|tokens; the limit is|has no tokens of its own"
    ),
    "integers with a point": r"got `float`|num_ctx: must be a number of tokens, is [0-9]+\.0",
    "base64": r"Invalid base64 encoded string|bytes are (no whole numbers|not the shape)",
    "objects with an empty text": r"is empty\.",
    "two names of one flag": r"contradicts normalize",
    "tensors": r"inputs\[\d\]\.(shape|data|name|parameters\.binary_data_size): |two tensors are pairs|one, or one for each",
    "equal values": r"for [0-9,]+ \w+; there must be one|differs from dimensions|asks for something else than instances",
}
"""Messages of refusals of requests that fit the document. The names are those of REASONS."""
REASONS = {
    "of the served model": "The document is the same for all models, and which outputs, prompts and widths exist is not.",
    "integers with a point": "To JSON Schema 3.0 is an integer; the server takes integers without a point.",
    "base64": "Schemathesis takes any text for base64, and JSON Schema has no rule over the number of its bytes.",
    "objects with an empty text": "A query and a document have one type of object, and only a document's text may be empty.",
    "two names of one flag": "With a rule for them too, Schemathesis gives up on bodies that have so many rules.",
    "tensors": "JSON Schema has no rule that a shape fits its data, that bytes follow the JSON, or that names differ.",
    "equal values": "JSON Schema has no rule that two fields are equal or that two lists are equally long.",
}
CHECKS = {
    "negative_data_rejection": {"expected-statuses": [400, 404, 405, 413, 415, 422, 424]},
    "positive_data_acceptance": {"enabled": False},  # Replaced by `accepted`, which knows the exclusions.
}
CONFIG = {
    "seed": 1,
    "max-time": SECONDS,
    "suppress-health-check": ["filter_too_much"],  # Every text is a model's name, so no wrong one is found.
    "continue-on-failure": True,
    "generation": {"max-examples": 15, "deterministic": True, "database": "none", "no-shrink": True},
    "phases": {"stateful": {"enabled": False}},
    "checks": CHECKS,
}


def accepted(ctx: Any, response: Any, case: Any) -> bool | None:
    """Check that a request that fits the document is accepted, or refused for a reason of EXCLUSIONS."""
    from schemathesis.openapi.checks import RejectedPositiveData
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    try:
        return positive_data_acceptance(ctx, response, case)
    except RejectedPositiveData:
        text = response.content.decode()
        if response.status_code < 500 and any(re.search(pattern, text) for pattern in EXCLUSIONS.values()):
            return None
        raise


def described(recorder: Any, case_id: str, check: Any) -> str:
    """Return what was found, the request that shows it, and the answer."""
    interaction = recorder.interactions.get(case_id)
    answer = (
        "" if interaction is None or interaction.response is None else interaction.response.content.decode(errors="replace")
    )
    return f"{recorder.label}: {check.failure_info.failure}\n{check.failure_info.code_sample[:1500]}\n{answer[:500]}"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_answer_is_described() -> None:
    import schemathesis
    from schemathesis.engine import events, from_schema

    assert EXCLUSIONS.keys() == REASONS.keys()
    schemathesis.check(accepted)
    config = schemathesis.Config.from_dict(CONFIG)
    failures: list[str] = []
    tested: set[str] = set()
    num_cases = 0
    with Server("--workers", "1") as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=config)
        for event in from_schema(schema).execute():
            if isinstance(event, events.ScenarioFinished):
                tested.add(event.recorder.label)
                num_cases += len(event.recorder.cases)
                for case_id, checks in event.recorder.checks.items():
                    failures += [described(event.recorder, case_id, check) for check in checks if check.failure_info]
            elif isinstance(event, events.NonFatalError | events.FatalError):
                failures.append(str(event))
        assert server.process.poll() is None
        server.stop()
    assert not failures, "\n\n".join(failures)
    assert "Traceback" not in server.log
    routes = {f"{method.upper()} {path}" for path, methods in schema.raw_schema["paths"].items() for method in methods}
    assert routes - {"GET /openapi.json"} <= tested, routes - tested  # Schemathesis leaves out the document itself
    assert num_cases > 1000
