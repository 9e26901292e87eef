"""What the engine asks of a model for each request."""

from types import SimpleNamespace

import pytest


pytest.importorskip("vllm.config", reason="vLLM is not installed (see examples/vllm)")

from helpers.processes.engine_models import save_model
from hf_xattn import XAttnConfig
from hf_xattn.vllm_plugin import requests


def test_image_tokens_are_counted_once(tmp_path, monkeypatch):
    """A chat that builds the tower to count its tokens: the engine makes a new `XAttnProcessingInfo` for each."""
    save_model(tmp_path)
    built, build = [], requests.build_tower
    monkeypatch.setattr(requests, "build_tower", lambda config: built.append(config) or build(config))
    config = XAttnConfig.from_pretrained(tmp_path)
    model = SimpleNamespace(hf_config=config, tokenizer=str(tmp_path), tokenizer_revision=None, trust_remote_code=False)
    context = SimpleNamespace(get_hf_config=lambda kind: config, model_config=model)
    counts = [requests.XAttnProcessingInfo(context).tokens_per_image for _ in range(3)]
    assert counts == [16] * 3 and len(built) == 1
