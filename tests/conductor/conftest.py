"""A real tokenizer, made here, and an app over a scripted gateway."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvloop
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.grammar.grammar_checker import GrammarChecker
from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.stored_responses.response_store import ResponseStore, StoredResponse
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_conductor.text.tokenizer_interface import Tokenizer as ModelTokenizer
from halfmoon_metadata.stores.memory_values import MemoryValues
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.conductor.fronts import TEXT, Front, client_of

CHAT_TEMPLATE = """\
{%- if tools %}{{ '<tool_call>' + tools | tojson }}{% endif %}
{%- if mood %}{{ '(' + mood + ')' }}{% endif %}
{%- if enable_thinking is false %}{{ '(quick)' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('a system message must be the first one') }}
{%- endif %}
{{- '<|turn|>' + message.role + ':' + message.content }}
{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|turn|>assistant:' }}
{%- endif %}
"""
_TEXTS = [
    "The kettle sang while the rain drew slow lines on the window, and nobody hurried.",
    "def moon(phase: float) -> str: return 'half' if 0.2 < phase < 0.8 else 'other'",
    "Größe, naïveté, œuvre, 半月, 数据, полумесяц, 🌗🌘🌑 and a flag 🇫🇷.",
]


def _train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS * 4, trainer)
    # One whose characters are all in the alphabet of bytes, and one with others in it.
    tokenizer.add_tokens([AddedToken("<été>"), AddedToken("half moon 半")])
    return tokenizer


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Any]:
    """Try TLS on the loop that services have, too."""
    made: dict[str, Any] = {"asyncio": asyncio.new_event_loop}
    if item.path.name == "test_tls_gate.py":
        made["uvloop"] = uvloop.new_event_loop
    return made


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    """A byte-level BPE as it comes from the library."""
    return _train()


@pytest.fixture(scope="session")
def model_folder(bpe: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the hub lays it out, without weights."""
    folder = tmp_path_factory.mktemp("model")
    bpe.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "bos_token": None, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> HubTokenizer:
    return HubTokenizer(model_folder)


@pytest.fixture
def card() -> ModelCard:
    return ModelCard(
        name="lab/moon", max_context=200, created=1_700_000_000, fingerprint="fp_0123456789ab"
    )


@pytest.fixture
def gateway(card: ModelCard, tokenizer: HubTokenizer) -> ScriptedGateway:
    """Says a sentence with characters of several tokens, then the end-of-text token."""
    script = tokenizer.encode(TEXT, add_special_tokens=False)
    return ScriptedGateway([*script, 0], model=card)


@pytest.fixture(scope="session", autouse=True)
def kept_checkers() -> Iterator[None]:
    """All apps with one tokenizer have one checker of grammars: its process takes a second."""
    made: dict[object, GrammarChecker] = {}
    of = GrammarChecker.of

    def kept(tokenizer: ModelTokenizer) -> GrammarChecker:
        key = tokenizer.definition, tokenizer.vocab_size, tuple(tokenizer.eos_token_ids)
        if key not in made:
            made[key] = of(tokenizer)
        return made[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GrammarChecker, "of", kept)
        yield
    for checker in made.values():
        checker.close()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def responses() -> Iterator[ResponseStore]:
    """Responses of this process, one of which is there already."""
    values = MemoryValues(ttl_s=60, max_bytes=2**20)
    store = ResponseStore(values, 60)
    items = b'[{"role":"user","content":"Hi"},{"role":"assistant","content":"Half."}]'
    stored = StoredResponse(msgspec.Raw(b'{"id":"resp_1"}'), msgspec.Raw(items))
    assert asyncio.run(store.save("", "resp_1", stored))
    yield store
    store.close()


@pytest.fixture
def model_aliases() -> tuple[str, ...]:
    """Patterns of further names of the model."""
    return ()


@pytest.fixture
def app(
    gateway: ScriptedGateway,
    tokenizer: HubTokenizer,
    registry: CollectorRegistry,
    responses: ResponseStore,
    model_aliases: tuple[str, ...],
) -> FastAPI:
    return create_app(
        gateway, tokenizer, registry=registry, responses=responses, model_aliases=model_aliases
    )


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client inside this process."""
    async with client_of(app) as client:
        yield client


@pytest.fixture
def front(client: httpx.AsyncClient, gateway: ScriptedGateway, tokenizer: HubTokenizer) -> Front:
    """The client, with what is behind it."""
    return Front(client, gateway, tokenizer)


@pytest.fixture
def room(gateway: ScriptedGateway, card: ModelCard) -> None:
    """A context with room for tools and many turns."""
    gateway.card = msgspec.structs.replace(card, max_context=1_000_000)
