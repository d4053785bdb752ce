"""AdapterRegistry: loading, eviction, waiting, and adapters that are removed while requests use them."""

from __future__ import annotations

import pytest

from quire.base.errors import ModelFormatError, RequestError
from quire.base.ids import RequestId
from quire.contracts.lora import AdapterReport, LoRARequest
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.engine.adapters import AdapterRegistry


class Store:
    """Keeps the keys of what is loaded; the key is the path."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def load(self, path: str) -> AdapterReport:
        if path == "bad":
            raise ModelFormatError("it is damaged")
        assert path not in self.keys
        self.keys.append(path)
        return AdapterReport(path, 4, 2, 64)

    def unload(self, key: str) -> None:
        self.keys.remove(key)


ONE, TWO, THREE = (LoRARequest(name, number, f"/{name}") for number, name in enumerate(("one", "two", "three"), 1))


def request(name: str, lora: LoRARequest) -> Request:
    return Request(request_id=RequestId(name), prompt_token_ids=[1], params=SamplingParams(), seed=0, lora=lora)


def test_an_adapter_is_loaded_once():
    store = Store()
    registry = AdapterRegistry(store, 2)
    assert registry.add(ONE)
    assert not registry.add(ONE)
    assert registry.admit(request("a", ONE)).adapter_key == "/one"
    assert store.keys == ["/one"]


def test_the_least_recently_used_one_makes_room():
    store = Store()
    registry = AdapterRegistry(store, 2)
    first, second = request("a", ONE), request("b", TWO)
    for one in (first, second):
        registry.admit(one)
        registry.release(one)
    again = request("c", ONE)
    registry.admit(again)
    registry.release(again)
    registry.admit(request("d", THREE))
    assert store.keys == ["/one", "/three"]
    assert [lora.lora_name for lora in registry.loaded] == ["one", "three"]


def test_requests_wait_in_order_while_all_adapters_are_in_use():
    store = Store()
    registry = AdapterRegistry(store, 1)
    first, second, third = request("a", ONE), request("b", TWO), request("c", ONE)
    assert registry.admit(first) is not None
    assert registry.admit(second) is None
    assert registry.admit(third) is None  # although its adapter is loaded: it would let the second wait for ever
    assert registry.take_ready() == []
    assert registry.has_waiting
    registry.release(first)
    assert [(ready.request_id, ready.adapter_key) for ready, _ in registry.take_ready()] == [("b", "/two")]
    registry.release(second)
    assert [ready.request_id for ready, _ in registry.take_ready()] == ["c"]
    assert not registry.has_waiting
    assert store.keys == ["/one"]


def test_a_waiting_request_can_be_aborted():
    registry = AdapterRegistry(Store(), 1)
    registry.admit(request("a", ONE))
    registry.admit(request("b", TWO))
    assert registry.remove_waiting("b")
    assert not registry.remove_waiting("b")
    assert not registry.has_waiting


def test_a_removed_adapter_stays_until_its_last_request_has_ended():
    store = Store()
    registry = AdapterRegistry(store, 2)
    running = request("a", ONE)
    registry.admit(running)
    assert registry.remove(1)
    assert not registry.remove(1)
    assert store.keys == ["/one"]
    registry.release(running)
    assert store.keys == []


def test_names_and_numbers_are_not_mixed_up():
    registry = AdapterRegistry(Store(), 2)
    registry.add(ONE)
    with pytest.raises(RequestError, match="'one' is loaded with number 1 from '/one'"):
        registry.admit(request("a", LoRARequest("one", 1, "/other")))
    with pytest.raises(RequestError, match="lora_int_id 1 is that of the LoRA adapter 'one'"):
        registry.admit(request("b", LoRARequest("other", 1, "/other")))


def test_an_adapter_is_replaced_under_its_name_while_requests_use_the_old_one():
    store = Store()
    registry = AdapterRegistry(store, 2)
    running = registry.admit(request("a", ONE))
    registry.add(LoRARequest("one", 4, "/new"))
    registry.remove(1)
    assert store.keys == ["/one", "/new"]
    assert registry.admit(request("b", LoRARequest("one", 4, "/new"))).adapter_key == "/new"
    registry.release(running)
    assert store.keys == ["/new"]


def test_what_cannot_be_loaded_is_an_error_of_its_request():
    registry = AdapterRegistry(Store(), 1)
    bad = LoRARequest("broken", 9, "bad")
    with pytest.raises(RequestError, match="'broken' cannot be loaded: it is damaged"):
        registry.admit(request("a", bad))
    running = request("b", ONE)
    registry.admit(running)
    assert registry.admit(request("c", bad)) is None
    registry.release(running)
    ((failed, error),) = registry.take_ready()
    assert (failed.request_id, "it is damaged" in str(error)) == ("c", True)
    with pytest.raises(RequestError, match="enable_lora"):
        AdapterRegistry(None, 1).add(ONE)


def test_add_is_refused_while_all_are_in_use():
    registry = AdapterRegistry(Store(), 1)
    registry.admit(request("a", ONE))
    with pytest.raises(RequestError, match="max_loras is 1"):
        registry.add(TWO)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (("", 1, "/a"), "lora_name"),
        (("a", 0, "/a"), "lora_int_id"),
        (("a", 1, ""), "lora_path"),
        (("a", True, "/a"), "lora_int_id"),
    ],
)
def test_requests_of_adapters_are_checked(fields, param):
    with pytest.raises(RequestError) as caught:
        LoRARequest(*fields)
    assert caught.value.param == param
