"""The OpenAPI document agrees with the routes, with the table of fields, and with what the readers take."""

import httpx
import jsonschema
import pytest

from deepinfer.server.app import make_app
from deepinfer.server.protocol import BODIES, HARMLESS, HONOURED, REFUSED
from tests.server.scripted import Server
from tests.server.test_changed_bodies import CHAT, COMPLETION
from tests.server.test_messages import CLAUDE_CODE, CODEX


@pytest.fixture(scope="module")
def document(shared_server):
    return httpx.get(f"{shared_server.url}/openapi.json").json()


def test_every_route_is_in_the_document_and_the_other_way_round(shared_server, document):
    routes = make_app(shared_server.service)._app.routes
    served = {(route.path.replace(":path", ""), method) for route in routes for method in route.methods - {"HEAD"}}
    told = {(path, method.upper()) for path, item in document["paths"].items() for method in item}
    assert told == served
    assert ("/openapi.json", "GET") in told
    operations = [each for item in document["paths"].values() for each in item.values()]
    assert all(each["summary"] for each in operations)
    assert len({each["operationId"] for each in operations}) == len(operations)


@pytest.mark.parametrize("api", BODIES)
def test_every_field_is_in_the_document_with_its_meaning(document, api):
    schema = document["components"]["schemas"][BODIES[api].__name__]
    assert set(schema["properties"]) == HONOURED[api] | HARMLESS[api] | REFUSED[api].keys()
    assert not schema["additionalProperties"]
    for name, neutral in REFUSED[api].items():
        assert schema["properties"][name]["enum"] == [None, *neutral]


@pytest.mark.parametrize(
    ("name", "body"),
    [("ChatBody", CHAT), ("CompletionsBody", COMPLETION), ("MessagesBody", CLAUDE_CODE), ("ResponsesBody", CODEX)],
)
def test_bodies_of_clients_fit_the_document(document, name, body):
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    assert [f"{each.json_path}: {each.message}" for each in validator.iter_errors(body)] == []
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(body | {"model": "unknown"})
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(body | {"unknown": 1})


def test_turns_of_agents_fit_the_document(document):
    easy = {"model": "nano", "input": [{"role": "user", "content": "a"}]}
    patch = {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "x"}
    result = {"type": "custom_tool_call_output", "call_id": "1", "output": "y"}
    system = {"model": "nano", "messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}
    for name, body in (
        ("ResponsesBody", easy),
        ("ResponsesBody", easy | {"input": [*easy["input"], patch, result]}),
        ("MessagesBody", system),
    ):
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(body)


def test_keys_are_in_the_document_if_the_server_asks_for_them(document):
    assert "security" not in document
    made = Server(api_keys=("one",))
    try:
        guarded = httpx.get(f"{made.url}/openapi.json").json()
    finally:
        made.close()
    assert guarded["security"] == [{"bearer": []}, {"key": []}]
    assert guarded["components"]["securitySchemes"].keys() == {"bearer", "key"}
    assert guarded["paths"]["/health"]["get"]["security"] == []
    assert "security" not in guarded["paths"]["/v1/models"]["get"]
