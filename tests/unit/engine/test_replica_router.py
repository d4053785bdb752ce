"""Where a request goes: the least predicted wait, prefixes that a replica was sent, replicas that end and come back."""

import random

import pytest

from quire.contracts.pooling_params import PoolingParams
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.engine.replica_router import ReplicaRouter, SentPrefixes

BLOCK = 4


def make_router(num_replicas=2, max_num_seqs=8, num_kv_blocks=100, speeds=None):
    router = ReplicaRouter(speeds or [1.0] * num_replicas)
    for index in range(num_replicas):
        router.open(index, max_num_seqs=max_num_seqs, block_size=BLOCK, num_kv_blocks=num_kv_blocks)
    return router


def make_request(name, token_ids=(1, 2, 3), is_background=False, salt="", pooling=None, **params):
    return Request(
        request_id=name,
        prompt_token_ids=tuple(token_ids),
        params=SamplingParams(**{"max_tokens": 16, "temperature": 1.0, **params}),
        seed=0,
        cache_salt=salt,
        is_background=is_background,
        pooling=pooling,
    )


def send(router, request, candidates=(0, 1)):
    route = router.choose(request, candidates)
    router.add(request, route)
    return route.replica


def test_requests_alternate_when_all_are_alike():
    router = make_router(3)
    found = [send(router, make_request(f"r{n}", [n] * 3), (0, 1, 2)) for n in range(9)]
    assert [found.count(index) for index in range(3)] == [3, 3, 3]


def test_a_queued_prompt_counts_until_it_is_computed():
    router = make_router()
    assert send(router, make_request("long", range(400))) == 0
    assert [send(router, make_request(f"r{n}", [900 + n] * 10)) for n in range(3)] == [1, 1, 1]
    router.note_prefill("long", 390)
    assert send(router, make_request("next", [77] * 10)) == 0


def test_decoding_sequences_count_by_what_they_have_left():
    router = make_router()
    assert send(router, make_request("four", n=4)) == 0
    assert send(router, make_request("one")) == 1
    assert send(router, make_request("two", [5] * 3)) == 1
    router.note_output("four", 4 * 15)  # each has one token left
    assert send(router, make_request("three", [6] * 3)) == 0


def test_prompt_goes_where_its_prefix_was_sent_unless_the_wait_there_is_longer():
    router = make_router()
    talk = list(range(200))
    assert send(router, make_request("a", talk)) == 0
    router.end("a")
    route = router.choose(make_request("b", [*talk, 1, 2, 3]), (0, 1))
    assert (route.replica, route.num_cached_tokens) == (0, 200)
    assert send(router, make_request("busy", [3] * 300), (0,)) == 0
    assert router.choose(make_request("b", [*talk, 1, 2, 3]), (0, 1)).replica == 1


@pytest.mark.parametrize(
    "changes",
    [{"salt": "other"}, {"prompt_logprobs": 1}, {"pooling": PoolingParams(pooling="mean")}],
    ids=["salt", "prompt_logprobs", "mean"],
)
def test_no_token_counts_as_cached_where_the_cache_does_not_serve_it(changes):
    router = make_router()
    send(router, make_request("a", range(40)))
    assert router.choose(make_request("b", range(40), **changes), (0,)).num_cached_tokens == 0


def test_the_last_token_is_always_computed():
    router = make_router()
    send(router, make_request("a", range(40)))
    assert router.choose(make_request("b", range(40)), (0,)).num_cached_tokens == 36


def test_nothing_is_known_of_prefixes_when_caching_is_off():
    router = make_router(num_kv_blocks=0)
    send(router, make_request("a", range(40)))
    assert router.choose(make_request("b", range(40)), (0,)).num_cached_tokens == 0


def test_a_replica_without_room_is_passed_over_though_it_holds_the_prefix():
    router = make_router(max_num_seqs=1)  # one that runs, four that are next
    talk = list(range(400))
    for n in range(5):
        assert send(router, make_request(f"r{n}", talk, max_tokens=1), (0,)) == 0
    assert router.choose(make_request("next", talk, max_tokens=1), (0, 1)).replica == 1
    assert router.choose(make_request("next", talk, max_tokens=1), (0,)).replica == 0  # none has room


def test_background_work_does_not_count_for_others_and_takes_no_room_from_them():
    router = make_router(max_num_seqs=1)
    for n in range(5):
        send(router, make_request(f"b{n}", [n] * 100, is_background=True), (0,))
    assert send(router, make_request("online", [50] * 20), (1,)) == 1
    assert router.choose(make_request("next"), (0, 1)).replica == 0
    assert router.choose(make_request("more", is_background=True), (0, 1)).replica == 1


def test_the_faster_replica_gets_more():
    router = make_router(max_num_seqs=100, speeds=[3.0, 1.0])
    found = [send(router, make_request(f"r{n}", [n] * 10)) for n in range(40)]
    assert 28 <= found.count(0) <= 32


def test_a_replica_that_ended_has_neither_requests_nor_prefixes_and_begins_anew():
    router = make_router()
    send(router, make_request("a", range(100)), (0,))
    router.close(0)
    assert router.num_requests(0) == 0
    assert router.owner_of("a") is None
    router.note_output("a", 3)
    router.end("a")
    router.open(0, max_num_seqs=8, block_size=BLOCK, num_kv_blocks=100)
    assert router.choose(make_request("b", range(100)), (0,)).num_cached_tokens == 0


def test_expected_lengths_are_learned_from_outputs_that_ended_by_themselves():
    router = make_router()
    for n in range(200):
        name = f"r{n}"
        send(router, make_request(name, max_tokens=None))
        router.note_output(name, 500 if n % 2 else 10)
        router.end(name, is_complete=n % 2 == 0)
    assert router.mean_output_tokens == pytest.approx(10, rel=0.1)


def test_books_are_empty_after_any_order_of_events():
    rng = random.Random(3)
    router, live = make_router(3), []
    for step in range(2000):
        if live and rng.random() < 0.5:
            name = live.pop(rng.randrange(len(live)))
            router.note_prefill(name, rng.randrange(30))
            router.note_output(name, rng.randrange(5))
            router.end(name, is_complete=rng.random() < 0.5)
        elif rng.random() < 0.02:
            index = rng.randrange(3)
            live = [name for name in live if router.owner_of(name) != index]
            router.close(index)
            router.open(index, max_num_seqs=8, block_size=BLOCK, num_kv_blocks=100)
        else:
            send(router, make_request(f"s{step}", [rng.randrange(9)] * rng.randrange(1, 60)), (0, 1, 2))
            live.append(f"s{step}")
        assert sum(router.num_requests(index) for index in range(3)) == len(live)
    assert all(len(replica.prefixes) <= 100 for replica in router.replicas)


def test_least_recently_used_blocks_are_forgotten_from_the_end_of_their_prompt():
    sent = SentPrefixes(4)
    sent.note([1, 2, 3])
    sent.note([11, 12])
    assert len(sent) == 4
    assert sent.num_known([1, 2, 3]) == 2
    assert sent.num_known([11, 12]) == 2
    assert sent.num_known([2, 3]) == 1
