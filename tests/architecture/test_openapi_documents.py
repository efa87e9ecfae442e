"""The OpenAPI documents: valid, as the code says, and without a part that is not described."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openapi_spec_validator import validate

from tools.openapi.__main__ import DOCUMENTS, FOLDER, main

NAMES = sorted(DOCUMENTS)


def document(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return read


def operations(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document(name)["paths"].items():
        for method, operation in methods.items():
            yield f"{method} {path}", operation


def test_the_documents_are_what_the_code_says() -> None:
    assert main(["--check"]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_document_is_valid_and_its_operations_and_answers_are_described(name: str) -> None:
    validate(document(name))
    for where, operation in operations(name):
        assert operation.get("summary"), where
        assert operation.get("operationId"), where
        assert all(each["description"] for each in operation["responses"].values()), where


def test_parameters_and_fields_are_described() -> None:
    for name in ("metadata.openapi.json", "kvstore.openapi.json"):
        for where, operation in operations(name):
            for parameter in operation.get("parameters", []):
                described = parameter.get("description") or parameter["schema"].get("description")
                assert described, f"{where} {parameter['name']}"
    for name in ("kvstore.openapi.json", "conductor-debug.openapi.json"):
        for kind, schema in document(name)["components"]["schemas"].items():
            for field, described in schema.get("properties", {}).items():
                assert described.get("description") or "$ref" in described, f"{kind}.{field}"
