"""The tables of fields against the official client, the readers and the document."""

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from router.errors import BadRequest
from router.openai import tables
from router.openai.document import body_schema, document
from router.openai.requests import read_chat, read_completion
from router.openai.responses import read_response
from router.openai.tokenizing import read_detokenize, read_tokenize
from tests.fakes_dispatch import FakeDispatcher, http_front
from tests.smollm2_text import smollm2_text

ROOT = Path(__file__).parents[2]
USER = {"role": "user", "content": "hi"}
Reader = Callable[[Mapping[str, Any]], Any]
ENDPOINTS: dict[str, tuple[tables.Table, Reader, dict[str, Any]]] = {
    "/v1/completions": (tables.COMPLETIONS, read_completion, {"prompt": "hi"}),
    "/v1/chat/completions": (tables.CHAT, read_chat, {"messages": [USER]}),
    "/v1/responses": (tables.RESPONSES, read_response, {"input": "hi"}),
    "/tokenize": (tables.TOKENIZE, read_tokenize, {"prompt": "hi"}),
    "/detokenize": (tables.DETOKENIZE, read_detokenize, {"tokens": [1]}),
}
MODULES = {
    "/v1/completions": completion_create_params,
    "/v1/chat/completions": chat_create_params,
    "/v1/responses": response_create_params,
}


def client_fields(module: Any) -> set[str]:
    """Every parameter that the official client's `create` can send."""
    kinds = [kind for name, kind in inspect.getmembers(module) if "ParamsBase" in name or "Streaming" in name]
    names: set[str] = set()
    for kind in kinds:
        names |= kind.__annotations__.keys()
    assert {"model", "stream"} <= names
    return names


@pytest.mark.parametrize("path", MODULES)
def test_every_field_of_the_official_client_is_read_refused_or_a_label(path: str) -> None:
    table = ENDPOINTS[path][0]
    assert client_fields(MODULES[path]) - table.reads.keys() - table.refuses.keys() - table.labels == set()


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_field_is_in_one_list_only(path: str) -> None:
    table = ENDPOINTS[path][0]
    assert not table.reads.keys() & table.refuses.keys()
    assert not (table.reads.keys() | table.refuses.keys()) & table.labels
    assert set(table.required) <= table.reads.keys()


class Watched(dict[str, Any]):
    """A body that notes which fields a reader asks for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_readers_ask_for_every_field_of_their_table(path: str) -> None:
    """That they ask for no other is an assertion in `Fields`."""
    table, read, body = ENDPOINTS[path]
    watched = Watched(body)
    read(watched)
    shown_labels = {"user"} if path == "/v1/responses" else set()
    assert watched.asked - shown_labels == table.reads.keys()


@pytest.mark.parametrize("path", ENDPOINTS)
def test_null_is_absent_in_every_field(path: str) -> None:
    table, read, body = ENDPOINTS[path]
    nulls = dict.fromkeys({*table.reads, *table.refuses, *table.labels})
    assert read({**nulls, **body}) == read(body)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_refused_field_is_refused_by_name_and_taken_where_it_asks_for_nothing(path: str) -> None:
    table, read, body = ENDPOINTS[path]
    for name, harmless in table.refuses.items():
        for value in ("no such value", 7, {"x": 1}, [1]):
            with pytest.raises(BadRequest, match=f"^{name} is not supported") as caught:
                read({**body, name: value})
            assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
        for value in harmless:
            assert read({**body, name: value}) == read(body)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_labels_change_nothing(path: str) -> None:
    table, read, body = ENDPOINTS[path]
    labels = table.labels - {"user"}  # a response repeats it
    assert read({**body, **dict.fromkeys(labels, "x")}) == read(body)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_document_has_exactly_the_fields_of_the_tables(path: str) -> None:
    table = ENDPOINTS[path][0]
    post = document("1")["paths"][path]["post"]
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    assert schema == body_schema(table)
    assert schema["properties"].keys() == table.reads.keys() | table.refuses.keys() | table.labels


def test_the_document_has_exactly_the_paths_that_are_served() -> None:
    served = {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in http_front(FakeDispatcher(), smollm2_text()).routes()
        for method in (route.methods or set()) - {"HEAD"}
    }
    documented = {
        (path, method)
        for path, operations in document("1")["paths"].items()
        for method in operations.keys() & {"get", "post"}
    }
    assert documented == served


def test_every_reference_of_the_document_leads_somewhere() -> None:
    made = document("1")
    text = repr(made)
    for name in re.findall(r"#/components/schemas/(\w+)", text):
        assert name in made["components"]["schemas"]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_page_for_users_names_every_endpoint_and_field(path: str) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    table = ENDPOINTS[path][0]
    names = {*table.reads, *table.refuses, *table.labels}
    assert path in page
    assert {name for name in names if f"`{name}`" not in page} == set()
