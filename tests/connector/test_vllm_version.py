"""The connector names the vLLM that it needs."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from halfmoon_vllm.vllm_version import VLLM_VERSION, VllmUnavailable, check_vllm


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_connector_says_what_it_needs() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import halfmoon_vllm.connector"], capture_output=True, text=True
    )
    assert f"VllmUnavailable: HalfmoonConnector needs vllm {VLLM_VERSION}" in ran.stderr


def test_another_release_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfmoon_vllm.vllm_version.version", lambda name: "0.33.0")
    with pytest.raises(
        VllmUnavailable, match=rf"HalfmoonConnector needs vllm {VLLM_VERSION}.*0\.33"
    ):
        check_vllm("HalfmoonConnector")
