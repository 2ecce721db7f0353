"""Schemathesis reads the OpenAPI document: what it forbids is refused, and every answer is as it says."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode

from router.openai.document import document
from tests.fakes_dispatch import http_app
from tests.smollm2_text import smollm2_text
from tests.unit.test_http import answering

# Conversations are slow to make up.
NUM_EXAMPLES = {"/v1/chat/completions": 8, "/tokenize": 8, "/v1/completions": 8, "/v1/responses": 10}
PATHS = document("1")["paths"]
CASES = [
    *((path, "allowed") for path in PATHS if path != "/openapi.json"),  # Schemathesis leaves it out itself
    *((path, "forbidden") for path, operations in PATHS.items() if "post" in operations),
]
MODES = {"allowed": GenerationMode.POSITIVE, "forbidden": GenerationMode.NEGATIVE}


@pytest.mark.parametrize(("path", "mode"), CASES)
def test_answers_are_as_documented_and_what_is_forbidden_is_refused(path: str, mode: str) -> None:
    """Not checked: that all the document allows is taken. Fields that are fine each may not go together."""
    load_all_checks()
    acceptance = CHECKS.get_one("positive_data_acceptance")
    app = http_app(answering(), smollm2_text())
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operation: Any = schema[path]["POST" if "post" in PATHS[path] else "GET"]

    @settings(
        max_examples=NUM_EXAMPLES.get(path, 10),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=MODES[mode]))
    def check(case: Any) -> None:
        case.call_and_validate(excluded_checks=[acceptance])

    check()
