"""``--ask``: the model that reads, in one option."""

import pytest

from ctxguard.errors import ConfigurationError
from ctxguard.server.system import Asked, AssessorSettings


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"ask": "openai:gpt-x"}, ("chat", "gpt-x", None)),
        ({"ask": "openai:a:b", "assessor_url": "http://h/v1"}, ("chat", "a:b", "http://h/v1")),
        ({"ask": "rerank:http://h:8080"}, ("reranker", None, "http://h:8080")),
        ({"ask": "cross-encoder:models/own"}, ("cross-encoder", "models/own", None)),
        ({"assessor": "decisions", "assessor_model": "m"}, ("decisions", "m", None)),
        ({}, None),
    ],
)
def test_the_option_names_a_model(given: dict[str, str], asked: Asked | None) -> None:
    assert AssessorSettings(**given).asked == asked


@pytest.mark.parametrize("wrong", ["gpt-x", "openai:", "anthropic:m", ""])
def test_another_form_is_refused(wrong: str) -> None:
    with pytest.raises(
        ConfigurationError, match="openai:MODEL, rerank:URL or cross-encoder:FOLDER"
    ):
        _ = AssessorSettings(ask=wrong).asked


def test_two_models_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="leave one out"):
        _ = AssessorSettings(ask="openai:m", assessor="chat").asked
