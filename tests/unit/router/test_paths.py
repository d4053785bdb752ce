import pytest

from quire.router.incoming import Incoming
from quire.router.paths import is_passed_on, plain_path, refusal
from quire.serving.body_room import BodyRoom


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/requests/a/timeline", "/v1/models/org/name", "/api/chat"])
def test_paths_of_the_apis_are_passed_on(path):
    assert is_passed_on(path)


@pytest.mark.parametrize(
    "path",
    [
        *("/sleep", "/wake_up", "/experts/rebalance", "/metrics", "/v1", "/v1/load_lora_adapter"),
        *("/v1/../sleep", "/v1/./load_lora_adapter", "/v1//load_lora_adapter", "/v1/models/.."),
    ],
)
def test_other_paths_are_not_passed_on(path):
    assert not is_passed_on(path)


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/sleep", "/wake_up"])
def test_routes_of_one_server_are_refused_with_the_reason(path):
    assert "send the request to that server" in refusal(path)
    assert refusal("/nothing") == "there is no '/nothing' here"


def test_deployment_names_the_model_when_the_path_is_azures():
    assert plain_path("/openai/deployments/org/name/chat/completions") == ("/v1/chat/completions", "org/name")
    assert plain_path("/openai/deployments/a/../../sleep") == ("/openai/deployments/a/../../sleep", None)


def test_target_is_one_line_when_only_the_decoded_path_is_known():
    scope = {"type": "http", "method": "GET", "path": "/v1/a b\r\nx: y", "query_string": b"c=1", "headers": []}
    with BodyRoom(1).share() as share:
        assert Incoming(scope, None, None, share).target == b"/v1/a%20b%0D%0Ax%3A%20y?c=1"
