"""Every parameter that the two clients can send is honoured, harmless or refused by name."""

import inspect

import pytest
from anthropic.resources.beta.messages import Messages as BetaMessages
from anthropic.resources.messages import Messages
from openai.resources.chat.completions import Completions as Chat
from openai.resources.completions import Completions
from openai.resources.responses import Responses

from deepinfer.server.failures import HttpError
from deepinfer.server.protocol import HARMLESS, HONOURED, REFUSED, check_fields

NOT_SENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout", "text_format"}
"""Parameters of a method that are no fields of the body."""


@pytest.mark.parametrize(
    ("api", "method"),
    [
        ("chat", Chat.create),
        ("completions", Completions.create),
        ("responses", Responses.create),
        ("messages", Messages.create),
        ("messages", Messages.count_tokens),
        ("messages", BetaMessages.create),
    ],
)
def test_every_parameter_of_the_clients_has_a_meaning(api, method):
    sent = set(inspect.signature(method).parameters) - NOT_SENT
    assert len(sent) > 5
    known = HONOURED[api] | HARMLESS[api] | REFUSED[api].keys()
    assert sorted(sent - known) == []


@pytest.mark.parametrize("api", HONOURED)
def test_no_field_has_two_meanings(api):
    assert not HONOURED[api] & HARMLESS[api]
    assert not (HONOURED[api] | HARMLESS[api]) & REFUSED[api].keys()


@pytest.mark.parametrize(("api", "name"), [(api, name) for api, names in REFUSED.items() for name in names])
def test_a_refused_field_is_named_unless_it_asks_for_nothing(api, name):
    for neutral in (None, *REFUSED[api][name]):
        check_fields(api, {name: neutral})
    with pytest.raises(HttpError, match=name) as caught:
        check_fields(api, {name: {"something": 1}})
    assert caught.value.param == name
