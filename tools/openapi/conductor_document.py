"""Make the OpenAPI documents of the conductor: its REST API, and what it serves to operators."""

from typing import Any

from prometheus_client import CollectorRegistry

from halfmoon_cli.common.demo_model import demo_model_folder
from halfmoon_conductor.page.role_routes import MAX_BODY_BYTES
from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.tenants import Tenants
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_scheduling.cluster.role_outlook import RoleOutlook, WorkerRole
from halfmoon_testing.conductor_http import ScriptedGateway
from tools.openapi.document_parts import (
    ERROR_SCHEMA,
    LICENSE,
    OPERATOR_TOKEN,
    VERSION,
    described_schemas,
    error_response,
    json_content,
)

Document = dict[str, Any]

_ABOUT = """\
What a conductor serves to operators, beside its REST API. With a cluster key it needs the \
operators' token, with a tenants file an operator's key, with both one of the two. Answers without \
a schema of their fields are for people and for Halfmoon's own page; fields may be added."""
_OBJECT = {"type": "object", "additionalProperties": True}
_TARGET_GROUPS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["targets", "labels"],
        "properties": {
            "targets": {"type": "array", "items": {"type": "string"}},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        },
    },
}
_SECONDS = {"type": "number", "minimum": 0, "x-unit": "s"}
_REFUSED = {
    "401": error_response("No token or key was shown, or none that is valid.", 401),
    "403": error_response("The key is none of an operator.", 403),
}
_WRONG = {"400": error_response("A parameter or field is wrong; `param` names it.", 400)}


def conductor_document() -> Document:
    """Return what ``/openapi.json`` has at a conductor with a tenants file."""
    app = create_app(
        ScriptedGateway(model=None),
        HubTokenizer(demo_model_folder()),
        registry=CollectorRegistry(),
        tenants=Tenants(()),
    )
    return app.openapi()


def debug_document() -> Document:
    """Return the document of the routes below ``/debug``."""
    (outlook, worker), components = described_schemas([RoleOutlook, WorkerRole])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Halfmoon conductor, for operators",
            "description": _ABOUT,
            "version": VERSION,
            "license": LICENSE,
        },
        "servers": [
            {
                "url": "{conductor}",
                "description": "Where the REST API is.",
                "variables": {"conductor": {"default": "http://127.0.0.1:8000"}},
            }
        ],
        "security": [{}, {"operatorToken": []}],
        "paths": {
            "/debug/cluster": {"get": _get("cluster", "Show workers and their loads", _OBJECT)},
            "/debug/decisions": {
                "get": _get(
                    "decisions",
                    "Show the last placements and refusals, with their reasons",
                    _OBJECT,
                    last={
                        "type": "integer",
                        "minimum": 0,
                        "maximum": 10**15 - 1,
                        "x-unit": "count",
                    },
                    request_id={
                        "type": "string",
                        "maxLength": 128,
                        "description": "Only decisions whose request id contains this text.",
                    },
                )
            },
            "/debug/activity": {
                "get": _get(
                    "activity",
                    "Show requests and prompt tokens of the last minutes by second, and which "
                    "workers joined and left",
                    _OBJECT,
                    after_s=_SECONDS,
                )
            },
            "/debug/latencies": {
                "get": _get(
                    "latencies",
                    "Show TTFT and TBT of the last minutes, by second",
                    _OBJECT,
                    after_s=_SECONDS,
                )
            },
            "/debug/prometheus-targets": {
                "get": _get(
                    "prometheusTargets",
                    "List the metrics endpoints of the conductor and of all live workers, for "
                    "Prometheus' http_sd_configs",
                    _TARGET_GROUPS,
                )
            },
            "/debug/roles": {
                "get": _get(
                    "roles",
                    "Show the roles of workers, and what the policy does next",
                    {
                        "allOf": [outlook],
                        "type": "object",
                        "required": ["now_s"],
                        "properties": {
                            "now_s": {**_SECONDS, "description": "By the conductor's clock."}
                        },
                    },
                )
            },
            "/debug/roles/{worker_id}": {"post": _set_role(worker)},
        },
        "components": {
            "schemas": {**components, "Error": ERROR_SCHEMA},
            "securitySchemes": OPERATOR_TOKEN,
        },
    }


def _get(name: str, summary: str, answer: Document, **query: Document) -> Document:
    return {
        "operationId": name,
        "summary": summary,
        "parameters": [
            {"name": each, "in": "query", "required": False, "schema": schema}
            for each, schema in query.items()
        ],
        "responses": {
            "200": {"description": "As it is now.", "content": json_content(answer)},
            **(_WRONG if query else {}),
            **_REFUSED,
        },
    }


def _set_role(worker: Document) -> Document:
    body = {
        "type": "object",
        "required": ["role"],
        "additionalProperties": False,
        "properties": {
            "role": {
                "enum": ["prefill", "decode", "auto"],
                "description": "The role to take on; auto: as the policy says.",
            }
        },
    }
    answer = {
        "type": "object",
        "required": ["worker"],
        "properties": {"worker": {"anyOf": [worker, {"type": "null"}]}},
    }
    return {
        "operationId": "setRole",
        "summary": "Ask a worker to change its role",
        "description": "It is answered at once. The worker finishes its requests first.",
        "parameters": [
            {
                "name": "worker_id",
                "in": "path",
                "required": True,
                "description": "Name of the worker; it may have slashes.",
                "schema": {"type": "string", "minLength": 1, "maxLength": 512},
            }
        ],
        "requestBody": {"required": True, "content": json_content(body)},
        "responses": {
            "200": {"description": "It is asked.", "content": json_content(answer)},
            **_WRONG,
            **_REFUSED,
            "404": error_response("There is no such worker.", 404),
            "409": error_response("The worker can't change its role now.", 409),
            "413": error_response(f"The body is over {MAX_BODY_BYTES} bytes.", 413),
        },
    }
