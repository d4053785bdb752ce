"""The choice of a backend, the prefix index and the retry budget, on a clock that the test moves."""

import heapq
import random
from collections import Counter

import msgspec
import pytest

from quire.base.errors import ConfigError
from quire.router.backend import BackendTable, LoadReport, PromptCounts
from quire.router.config import RouterConfig, parse_aliases, parse_backend
from quire.router.metrics import RouterMetrics
from quire.router.policy import make_policy, rendezvous
from quire.router.prefix_index import PrefixIndex
from quire.router.prompt import MAX_CHUNKS, parse_body
from quire.router.prompt_cost import CostEstimate, PromptCost
from quire.router.retry_budget import RetryBudget


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def make_table(num=3, **options):
    clock = Clock()
    addresses = tuple(parse_backend(f"http://127.0.0.1:{9000 + index}") for index in range(num))
    table = BackendTable(RouterConfig(backends=addresses, **options), clock)
    for backend in table:
        backend.mark_ready()
    return table, list(table), clock


def prompt_of(text, salt=b"", **more):
    return parse_body(msgspec.json.encode({"model": "m", "prompt": text, **more})).prompt(256, salt)


def words(num_bytes, seed):
    letters = random.Random(seed)
    return "".join(letters.choice("abcdefgh ") for _ in range(num_bytes))


def send(choose, table, prompt):
    choice = choose(list(table), prompt)
    choice.backend.prefixes.add(prompt.keys)
    return choice


def test_prompt_goes_where_its_prefix_was_sent():
    table, _, _ = make_table()
    choose = make_policy("prefix", table.mean_cost)
    first = send(choose, table, prompt_of(words(4000, 1)))
    for turn in range(5):
        choice = send(choose, table, prompt_of(words(4000, 1) + words(500 * turn, 2)))
        assert choice.backend is first.backend
        assert choice.num_cached_tokens >= 4000 / 4 - 64
    assert choice.reason == "prefix"


def test_cold_prompts_spread_over_the_backends():
    table, _, _ = make_table()
    choose = make_policy("prefix", table.mean_cost)
    counts = Counter(send(choose, table, prompt_of(words(2000, seed))).backend.name for seed in range(120))
    assert min(counts.values()) > 20


def test_prefix_gives_way_to_load_when_the_wait_is_longer_than_computing():
    table, _, _ = make_table(2)
    choose = make_policy("prefix", table.mean_cost)
    prompt = prompt_of(words(4000, 1))
    home = send(choose, table, prompt).backend
    home.begin(500, True)
    assert choose(list(table), prompt).backend is home  # 500 tokens wait, 1000 would be computed elsewhere
    home.begin(2000, True)
    choice = choose(list(table), prompt)
    assert choice.backend is not home
    assert choice.reason == "load"


def test_slow_backend_gets_less():
    table, (fast, slow), _ = make_table(2)
    fast.cost, slow.cost = PromptCost(0.0, 0.001), PromptCost(0.0, 0.01)
    choose = make_policy("prefix", table.mean_cost)
    for seed in range(20):
        assert choose(list(table), prompt_of(words(2000, seed))).backend is fast


def test_backend_learns_what_a_token_costs_from_streams_only():
    _, (backend, *_), clock = make_table()
    flight = backend.begin(100, True)
    clock.now += 0.5
    backend.first_byte(flight, is_good=True)
    assert backend.cost.s_per_token == pytest.approx(0.005)
    other = backend.begin(100, False)
    clock.now += 50
    backend.first_byte(other, is_good=True)
    assert backend.cost.s_per_token == pytest.approx(0.005)
    assert backend.num_queued_tokens == 0
    backend.end(flight, is_good=True)
    backend.end(other, is_good=True)
    assert backend.num_in_flight == 0


def test_what_each_prompt_costs_is_told_from_what_its_tokens_cost():
    _, (backend, *_), clock = make_table()
    random_lengths = random.Random(1)
    for _ in range(300):
        flights = [backend.begin(random_lengths.randrange(5, 500), True) for _ in range(random_lengths.randrange(1, 5))]
        for flight in flights:
            clock.now += 0.01 + 0.0001 * flight.num_prompt_tokens
            backend.first_byte(flight, is_good=True)
            backend.end(flight, is_good=True)
    assert backend.cost.s_per_prompt == pytest.approx(0.01, rel=0.01)
    assert backend.cost.s_per_token == pytest.approx(0.0001, rel=0.01)


def test_short_prompts_that_wait_are_counted_as_prompts_and_not_only_by_their_tokens():
    table, (many, one), _ = make_table(2)
    many.cost = one.cost = PromptCost(0.01, 0.0001)
    for _ in range(5):
        many.begin(10, True)
    one.begin(200, True)
    assert make_policy("prefix", table.mean_cost)(list(table), prompt_of("short")).backend is one


@pytest.mark.parametrize("seed", range(3))
def test_skewed_prompts_load_the_busiest_backend_at_most_a_third_more_than_the_mean(seed):
    """Half of the requests begin with the same prompt, and the others with few: affinity alone would give one backend half."""
    table, backends, clock = make_table(4)
    choose, draw = make_policy("prefix", table.mean_cost), random.Random(seed)
    shared = [words(4000, number) for number in range(12)]
    per_token_s, per_request_s, utilization = 0.0005, 0.2, 0.7
    free_s, running, busy_s = dict.fromkeys(backends, clock.now), [], Counter()
    mean_tokens = 250  # that are computed of a prompt, about
    num_cached = 0
    for number in range(1500):
        clock.now += draw.expovariate(4 * utilization / (mean_tokens * per_token_s + per_request_s))
        rank = 0 if draw.random() < 0.5 else min(int(draw.paretovariate(0.7)), len(shared) - 1)
        while running and running[0][0] <= clock.now:
            _, _, backend, flight = heapq.heappop(running)
            backend.first_byte(flight, is_good=True)
            backend.end(flight, is_good=True)
        prompt = prompt_of(shared[rank] + words(draw.randrange(200, 1500), 100 + number))
        choice = send(choose, table, prompt)
        backend, num_new = choice.backend, prompt.num_tokens - choice.num_cached_tokens
        num_cached += choice.num_cached_tokens > 0
        flight = backend.begin(num_new, is_streaming=False)
        took_s = num_new * per_token_s + per_request_s
        busy_s[backend] += took_s
        free_s[backend] = max(free_s[backend], clock.now) + took_s
        heapq.heappush(running, (free_s[backend], number, backend, flight))
    assert num_cached > 0.9 * number
    assert max(busy_s.values()) <= 1.3 * sum(busy_s.values()) / len(backends)


@pytest.mark.parametrize("s_per_prompt, s_per_token", [(0.02, 0.0), (0.0, 0.001)])
def test_costs_are_never_negative(s_per_prompt, s_per_token):
    estimate, picks = CostEstimate(), random.Random(2)
    for _ in range(200):
        num_prompts, num_tokens = picks.randrange(1, 9), picks.randrange(1, 999)
        took_s = (s_per_prompt * num_prompts + s_per_token * num_tokens) * picks.uniform(0.5, 1.5)
        cost = estimate.add(num_prompts, num_tokens, took_s)
        assert cost.s_per_prompt >= 0 <= cost.s_per_token
    assert cost.seconds(4, 500) == pytest.approx(s_per_prompt * 4 + s_per_token * 500, rel=0.15)


def test_full_backend_is_avoided_unless_all_are():
    table, (first, second), _ = make_table(2)
    choose = make_policy("prefix", table.mean_cost)
    prompt = prompt_of(words(4000, 1))
    first.prefixes.add(prompt.keys)
    assert choose(list(table), prompt).backend is first
    first.take_load(LoadReport(running=1, waiting=0, kv_blocks_free=2, kv_blocks_total=100))
    assert choose(list(table), prompt).backend is second
    second.take_load(LoadReport(running=1, waiting=0, kv_blocks_free=1, kv_blocks_total=100))
    assert choose(list(table), prompt).backend is first


def test_backend_without_a_free_place_is_waited_for():
    table, (first, second), _ = make_table(2)
    choose = make_policy("prefix", table.mean_cost)
    prompt = prompt_of(words(400, 1))
    first.prefixes.add(prompt.keys)
    first.take_load(LoadReport(running=4, waiting=0, max_num_seqs=4))
    assert choose(list(table), prompt).backend is second


def test_reported_requests_are_those_of_others():
    _, (backend, *_), _ = make_table()
    backend.begin(10, True)
    backend.take_load(LoadReport(running=3, waiting=2))
    assert backend.num_others == 4
    backend.take_load(LoadReport())
    assert backend.num_others == 0


@pytest.mark.parametrize("policy", ["prefix", "least-loaded", "round-robin"])
def test_health_checks_reset_no_load_and_dead_backends_count_for_nobody(policy):
    table, (busy, idle, dead), _ = make_table()
    flights = [busy.begin(500, True) for _ in range(3)]
    dead.mark_unhealthy("gone")
    for _ in range(10):
        for one in (busy, idle):
            one.mark_ready()
            one.take_load(LoadReport(running=0, waiting=0))
        assert (busy.num_in_flight, busy.num_queued_tokens, busy.num_others) == (3, 1500, 0)
    choose = make_policy(policy, table.mean_cost)
    chosen = {choose([one for one in table if one.is_available], prompt_of(words(400, 1))).backend for _ in range(4)}
    assert chosen == ({busy, idle} if policy == "round-robin" else {idle})
    for flight in flights:
        busy.end(flight, is_good=True)
    assert (busy.num_in_flight, busy.num_queued_tokens) == (0, 0)


def test_true_cached_tokens_are_counted_from_the_first_report_on_and_over_restarts():
    table, (backend,), _ = make_table(1)
    metrics = RouterMetrics(table)
    reports = [(1000, 900), (1100, 950), (1100, 950), (40, 10), (None, None), (60, 20), (80, 10)]
    for prompt_tokens, cached in reports:
        backend.take_load(LoadReport(prompt_tokens_total=prompt_tokens, cached_tokens_total=cached))
        text = metrics.render()[0].decode()
    backend.prompt_counts.sent, backend.prompt_counts.predicted = 70, 30
    text = metrics.render()[0].decode()
    for name, value in (("served_prompt", 240), ("served_cached", 80), ("prompt", 70), ("predicted_cached", 30)):
        assert f'quire_router:{name}_tokens_total{{backend="{backend.name}"}} {value}.0' in text
    backend.prompt_counts = PromptCounts(sent=5)  # removed, and added again
    assert f'quire_router:prompt_tokens_total{{backend="{backend.name}"}} 75.0' in metrics.render()[0].decode()


def test_least_loaded_counts_requests_of_others():
    table, (first, second, third), _ = make_table()
    choose = make_policy("least-loaded", table.mean_cost)
    first.begin(1, True)
    second.take_load(LoadReport(running=5, waiting=0))
    assert choose(list(table), prompt_of("x")).backend is third


def test_round_robin_takes_turns():
    table, found, _ = make_table()
    choose = make_policy("round-robin", table.mean_cost)
    assert [choose(found, prompt_of("x")).backend for _ in range(6)] == found * 2


def test_affinity_keeps_a_user_together_and_moves_few_when_a_backend_comes():
    table, found, _ = make_table(4)
    keys = [str(index).encode() for index in range(400)]
    before = [rendezvous(found, key)[0] for key in keys]
    assert min(Counter(backend.name for backend in before).values()) > 60
    table.add(parse_backend("http://127.0.0.1:9999"))
    after = [rendezvous(list(table), key)[0] for key in keys]
    moved = [new for old, new in zip(before, after, strict=True) if old is not new]
    assert 40 < len(moved) < 130
    assert {backend.name for backend in moved} == {"127.0.0.1:9999"}
    choose = make_policy("least-loaded", table.mean_cost)
    assert len({choose(found, prompt_of(words(900, seed), user="ann")).backend.name for seed in range(20)}) == 1


def test_recovered_backend_has_forgotten_and_gets_less_for_a_while():
    table, (first, second), clock = make_table(2)
    choose = make_policy("prefix", table.mean_cost)
    first.prefixes.add(prompt_of(words(4000, 1)).keys)
    first.mark_unhealthy("gone")
    assert not first.is_available
    clock.now += 100
    first.mark_ready()
    assert len(first.prefixes) == 0
    assert all(choose(list(table), prompt_of(words(400, seed))).backend is second for seed in range(10))
    clock.now += 11
    assert {choose(list(table), prompt_of(words(400, seed))).backend for seed in range(20)} == {first, second}


def test_backend_that_fails_twice_pauses_longer_and_longer():
    _, (backend, *_), clock = make_table()
    backend.note_failure("x", is_refused=False)
    assert backend.is_available
    pauses = []
    for _ in range(6):
        backend.note_failure("x", is_refused=False)
        pauses.append(backend.retry_at_s - clock.now)
    assert pauses == [2, 4, 8, 16, 30, 30]
    assert not backend.is_available
    clock.now += 31
    assert backend.is_available
    backend.note_success()
    backend.note_failure("x", is_refused=False)
    assert backend.is_available


def test_backend_that_never_stops_failing_pauses_for_the_longest_time():
    _, (backend, *_), clock = make_table()
    for _ in range(1100):
        backend.note_failure("x", is_refused=False)
    assert backend.retry_at_s - clock.now == 30


def test_index_is_bounded_and_forgets_the_ends_of_prompts_first():
    index = PrefixIndex(8)
    index.add([1, 2, 3, 4, 5])
    index.add([1, 2, 6, 7, 8, 9])
    assert len(index) == 8
    assert index.num_known([1, 2, 6, 7, 8, 9]) == 6
    assert index.num_known([1, 2, 3, 4, 5]) == 4
    index.limit(3)
    assert (len(index), index.num_known([1, 2, 6, 7])) == (3, 3)
    index.clear()
    assert index.num_known([1]) == 0


def test_chunks_depend_on_everything_before_them():
    same = prompt_of(words(2000, 1)), prompt_of(words(2000, 1) + "more")
    assert same[0].keys[:7] == same[1].keys[:7]
    changed = prompt_of("X" + words(2000, 1)[1:])
    assert not set(changed.keys) & set(same[0].keys)
    salted = prompt_of(words(2000, 1), salt=b"other")
    assert not set(salted.keys) & set(same[0].keys)
    assert len(prompt_of("x" * 256 * (MAX_CHUNKS + 10)).keys) == MAX_CHUNKS


def test_turns_of_a_conversation_share_their_chunks():
    turns = [{"role": "user", "content": words(1500, 1)}, {"role": "assistant", "content": words(1500, 2)}]
    found = []
    for num in (1, 2):
        body = msgspec.json.encode({"temperature": num, "messages": turns[:num], "model": "m", "tools": [{"a": 1}]})
        found.append(parse_body(body).prompt(256, b""))
    assert found[0].keys[:5] == found[1].keys[:5]
    assert len(found[1].keys) > len(found[0].keys)


def test_token_ids_are_counted():
    prompt = parse_body(b'{"prompt": [1, 2, 3]}').prompt(256, b"")
    assert (prompt.token_ids, prompt.num_tokens) == ((1, 2, 3), 3)


def test_retries_never_exceed_the_ratio_over_time():
    budget = RetryBudget(0.2)
    spent = 0
    for _ in range(1000):
        budget.earn()
        spent += budget.spend()
    assert 195 <= spent <= 211
    assert not RetryBudget(0.0).spend()


@pytest.mark.parametrize(
    "url", ["127.0.0.1:80", "ftp://a", "http://", "http://a/v1", "http://u@a", "http://a:x", "http://a:0", "http://a?b=1"]
)
def test_wrong_backend_is_refused(url):
    with pytest.raises(ConfigError, match="a backend must be a URL like"):
        parse_backend(url)


def test_backend_urls():
    assert parse_backend("http://a").name == "a:80"
    assert parse_backend("https://a/").url == "https://a:443"
    assert parse_backend("http://[::1]:8000").name == "[::1]:8000"


@pytest.mark.parametrize("pairs", [["a"], ["=b"], ["a="], ["a=b", "a=c"], ["a=a"], ["a=b", "b=c"]])
def test_wrong_alias_is_refused(pairs):
    with pytest.raises(ConfigError, match="--alias"):
        parse_aliases(pairs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "at least one --backend"),
        ({"policy": "x"}, "policy must be one of"),
        ({"port": 70000}, "port must be"),
        ({"max_retries": -1}, "max_retries"),
        ({"retry_ratio": 2.0}, "retry_ratio"),
        ({"health_interval_s": 0.0}, "health_interval_s"),
        ({"prefix_chunk_bytes": 0}, "prefix_chunk_bytes"),
        ({"backends": (parse_backend("http://a"), parse_backend("http://a:80"))}, "each backend may be given once"),
        ({"admin_key": " "}, "admin_key"),
    ],
)
def test_wrong_option_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RouterConfig(**options)
