"""Write or check the OpenAPI documents; see the package."""

import json
import sys
from pathlib import Path
from typing import Any

from tools.openapi.conductor_document import conductor_document, debug_document
from tools.openapi.metadata_document import metadata_document
from tools.openapi.operator_document import kvstore_document, worker_document

FOLDER = Path(__file__).resolve().parents[2] / "libs" / "protocol" / "schema"
#: What makes each document.
DOCUMENTS = {
    "conductor.openapi.json": conductor_document,
    "conductor-debug.openapi.json": debug_document,
    "metadata.openapi.json": metadata_document,
    "worker.openapi.json": worker_document,
    "kvstore.openapi.json": kvstore_document,
}


def document_text(document: dict[str, Any]) -> str:
    """Return a document as its file has it."""
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    """Write or check the files, and return the exit status."""
    made = {name: document_text(make()) for name, make in DOCUMENTS.items()}
    stale = [
        name
        for name, text in made.items()
        if not (FOLDER / name).exists() or (FOLDER / name).read_text() != text
    ]
    for name in stale:
        if "--check" in arguments:
            print(f"libs/protocol/schema/{name} is not what the code says: run `make schema`")
        else:
            (FOLDER / name).write_text(made[name])
            print(f"wrote libs/protocol/schema/{name}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
