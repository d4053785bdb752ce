import pytest
from reference_model import make_config, make_request
from scheduling_fakes import Driver

from quire.base.errors import RequestError
from quire.engine.scheduling.admission import check_servable, max_total_tokens

CONFIG = make_config(block_size=4, num_kv_blocks=5, max_model_len=64)  # room for 20 tokens


def test_request_is_refused_when_its_prompt_is_empty():
    with pytest.raises(RequestError, match="0 tokens") as raised:
        check_servable(make_request("r", 0), CONFIG)
    assert raised.value.param == "prompt"


def test_request_is_refused_when_no_output_token_fits_max_model_len():
    config = make_config(max_model_len=10)
    check_servable(make_request("r", 9), config)
    with pytest.raises(RequestError, match=r"10 tokens.*max_model_len 10.*at most 9") as raised:
        check_servable(make_request("r", 10), config)
    assert raised.value.param == "prompt"


def test_request_is_refused_when_its_prompt_exceeds_the_pool():
    check_servable(make_request("r", 20, max_tokens=None), CONFIG)
    with pytest.raises(RequestError, match=r"21 tokens.*20 tokens \(5 blocks of 4\)") as raised:
        check_servable(make_request("r", 21, max_tokens=None), CONFIG)
    assert raised.value.param == "prompt"


def test_request_is_refused_when_explicit_max_tokens_exceed_the_pool():
    check_servable(make_request("r", 16, max_tokens=5), CONFIG)
    with pytest.raises(RequestError, match=r"need room for 21 tokens.*lower max_tokens to 5") as raised:
        check_servable(make_request("r", 16, max_tokens=6), CONFIG)
    assert raised.value.param == "max_tokens"


def test_max_model_len_bounds_what_explicit_max_tokens_need():
    config = make_config(block_size=4, num_kv_blocks=5, max_model_len=21)
    check_servable(make_request("r", 16, max_tokens=1000), config)
    assert max_total_tokens(make_request("r", 16, max_tokens=1000), config) == 21


@pytest.mark.parametrize(
    "max_tokens, max_model_len, expected",
    [(3, 64, 13), (None, 64, 21), (None, 15, 15), (11, 64, 21)],
    ids=["max_tokens", "pool", "model", "exactly the pool"],
)
def test_output_ends_with_length_at_the_tightest_limit(max_tokens, max_model_len, expected):
    config = make_config(block_size=4, num_kv_blocks=5, max_model_len=max_model_len)
    driver = Driver(config)
    request = make_request("r", 10, max_tokens=max_tokens)
    assert max_total_tokens(request, config) == expected
    driver.add(request)
    driver.run()
    driver.check_outputs()
    output = driver.outputs[request.request_id, 0]
    assert (10 + len(output.tokens), output.reason) == (expected, "length")


def test_request_is_refused_while_its_id_is_in_use():
    driver = Driver(CONFIG)
    driver.add(make_request("r", 3, max_tokens=2))
    with pytest.raises(RequestError, match="'r' is in use") as raised:
        driver.scheduler.add(make_request("r", 3))
    assert raised.value.param == "request_id"
    driver.run()
    driver.add(make_request("r", 3, max_tokens=2))
    driver.run()
    driver.check_outputs()
