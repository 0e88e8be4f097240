"""Fuzzing by the OpenAPI document: valid and invalid requests get a response in time that conforms to it."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from attackers import check_error
from live_server import start

pytestmark = pytest.mark.slow

CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = {  # with the number of requests
    "POST /v1/completions": 30,
    "POST /v1/chat/completions": 30,
    "POST /v1/verify": 30,
    "POST /tokenize": 30,
    "POST /detokenize": 30,
    "GET /v1/models": 5,
    "GET /v1/models/{model}": 20,
    "GET /v1/traces/{id}": 20,
    "GET /health": 5,
    "GET /version": 5,
    "GET /metrics": 5,
}
SECONDS = 30.0


@pytest.fixture(scope="module")
def api() -> Iterator[schemathesis.BaseSchema]:
    """The document of a server that generates short texts."""
    server = start("--max-tokens", "3", "--max-choices", "2", "--timeout", "20")
    yield schemathesis.openapi.from_url(server.url + "/openapi.json")
    server.kill()
    assert "Traceback" not in "".join(server.log)


def check(case: Any) -> None:
    answer = case.call(timeout=SECONDS)
    if answer.status_code >= 400:
        headers = {name: values[0] for name, values in answer.headers.items()}
        error = check_error(answer.status_code, headers, answer.content)
        assert answer.status_code < 500, error
    case.validate_response(answer, checks=CHECKS)


def test_openapi_lists_all_operations(api: schemathesis.BaseSchema) -> None:
    assert {
        f"{operation.method.upper()} {operation.path}" for path in api.values() for operation in path.values()
    } == set(OPERATIONS)


@pytest.mark.parametrize("label", OPERATIONS)
def test_openapi_holds_for_valid_requests(api: schemathesis.BaseSchema, label: str) -> None:
    fuzz(api, label, GenerationMode.POSITIVE)


@pytest.mark.parametrize("label", [label for label in OPERATIONS if label.startswith("POST")])
def test_openapi_holds_for_invalid_requests(api: schemathesis.BaseSchema, label: str) -> None:
    fuzz(api, label, GenerationMode.NEGATIVE)


def fuzz(api: schemathesis.BaseSchema, label: str, mode: GenerationMode) -> None:
    operation = api.find_operation_by_label(label)
    assert operation

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=OPERATIONS[label], suppress_health_check=list(HealthCheck), derandomize=True)
    def run(case: Any) -> None:
        check(case)

    run()
