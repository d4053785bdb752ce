"""Messages and frames: what goes in comes out, and what is not understood is noticed."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.errors import RequestError
from quire.contracts.kv_compression import KvCompression
from quire.contracts.outputs import RequestMetrics
from quire.contracts.pooling_params import PoolingParams
from quire.contracts.request import Request
from quire.contracts.sampling_params import SamplingParams
from quire.serving.engine_client.framing import HEADER, FrameReader, FrameWriter, MessageError
from quire.serving.engine_client.messages import (
    Abort,
    ChoiceDelta,
    FromEngine,
    Heartbeat,
    RequestDelta,
    StepOutputs,
    StepPart,
    StepReport,
    Stop,
    Submit,
    ToEngine,
    TokenLogprob,
)

SESSION = b"session!"
token_ids = st.integers(0, 2**31 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
reals = st.floats(0, 1e300, allow_nan=False)
few_ids = st.lists(token_ids, max_size=4)


@st.composite
def sampling_params(draw):
    fields = {
        "temperature": st.one_of(st.integers(1, 5), reals.filter(lambda x: x > 0)),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(-1, 2**40),
        "min_p": st.floats(0, 1),
        "typical_p": st.floats(0, 1, exclude_min=True),
        "repetition_penalty": st.floats(0, 10, exclude_min=True),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.one_of(st.integers(-2, 2), st.floats(-2, 2)),
        "logit_bias": st.dictionaries(token_ids, st.one_of(st.integers(-100, 100), st.floats(-100, 100)), max_size=4),
        "allowed_token_ids": st.lists(token_ids, min_size=1, max_size=4),
        "bad_words": st.lists(texts, max_size=3),
        "stop": st.one_of(texts, st.lists(texts, max_size=3)),
        "stop_token_ids": few_ids,
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "max_tokens": st.one_of(st.none(), st.integers(5, 2**40)),
        "min_tokens": st.integers(0, 5),
        "seed": st.integers(-(2**63), 2**64 - 1),
        "logprobs": st.integers(-1, 100),
        "prompt_logprobs": st.integers(-1, 100),
        "skip_special_tokens": st.booleans(),
        "priority": st.integers(-(2**31), 2**31 - 1),
        "kv_compression": st.builds(
            KvCompression, method=st.sampled_from(["key_norm", "snapkv"]), compression_ratio=st.floats(0, 1, exclude_max=True)
        ),
        "n": st.integers(1, 8),
        "best_of": st.integers(8, 16),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(fields))))
    if "kv_compression" in chosen:  # which needs one choice
        chosen -= {"n", "best_of"}
    return SamplingParams(**{name: draw(fields[name]) for name in sorted(chosen)})


requests = st.builds(
    Request,
    request_id=texts,
    prompt_token_ids=st.lists(token_ids, min_size=1, max_size=30).map(tuple),
    params=sampling_params(),
    seed=st.integers(0, 2**64 - 1),
    prompt=st.none() | texts,
    eos_token_ids=st.frozensets(token_ids, max_size=4),
    arrival_time_s=reals,
    cache_salt=st.just("") | texts,
    is_background=st.booleans(),
    pooling=st.none()
    | st.builds(
        PoolingParams,
        pooling=st.sampled_from(["last", "mean"]),
        normalize=st.booleans(),
        dimensions=st.none() | st.integers(1, 2**31 - 1),
        priority=st.integers(-(2**31), 2**31 - 1),
    ),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(requests)
def test_request_comes_out_as_it_went_in(request):
    writer, reader = FrameWriter(SESSION), FrameReader(SESSION, ToEngine)
    submit = reader.read(bytes(writer.write(Submit.of(request)))).message
    assert submit.request() == request
    assert {type(value) for value in submit.request().params.logit_bias or ()} <= {int}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_reader_never_raises_when_frames_are_garbage(body):
    reader = FrameReader(SESSION, ToEngine)
    received = reader.read(body)
    assert (received.message, received.lost) == (None, (0, 0))
    received = reader.read(HEADER.pack(SESSION, 4) + body)
    assert received.lost in ((0, 4), (0, 3))
    assert (received.message is None) == (received.lost == (0, 4))


def test_params_are_checked_again_when_they_come_out():
    submit = Submit.of(Request(request_id="a", prompt_token_ids=(1,), params=SamplingParams(), seed=0))
    for params, param in (({"temperature": -1.0}, "temperature"), ({"foo": 1}, "params"), ({"n": "2"}, "n")):
        with pytest.raises(RequestError) as caught:
            msgspec.structs.replace(submit, params=params).request()
        assert caught.value.param == param
    assert msgspec.structs.replace(submit, params={"max_tokens": 1}).request().params == SamplingParams(max_tokens=1)
    with pytest.raises(RequestError):  # though it equals what was right before
        msgspec.structs.replace(submit, params={"max_tokens": True}).request()
    with pytest.raises(RequestError, match="no i32"):
        msgspec.structs.replace(submit, prompt_token_ids=b"12345").request()


def test_step_comes_out_as_it_went_in():
    choice = ChoiceDelta(1, "é", [5, 6], [[TokenLogprob(5, -0.5, 1)], [TokenLogprob(6, -1.5, None)]], "stop", "end", -2.0)
    delta = RequestDelta("a", [choice], True, RequestMetrics(1.0, 2.0, 3.0, None, 4, 5), [None, [TokenLogprob(1, 0.0, 1)]])
    report = StepReport(1, 2.0, 0.5, 3, 4, [(5, 5)], 6, 7, 8, 9, 10, 11, 12, [StepPart("a", 0, 3, True)])
    sent = StepOutputs([delta, RequestDelta("b", [], True, error="no", error_param="n", is_refused=True)], report)
    assert FrameReader(SESSION, FromEngine).read(bytes(FrameWriter(SESSION).write(sent))).message == sent


def test_reader_tells_what_is_missing():
    writer, reader = FrameWriter(SESSION), FrameReader(SESSION, FromEngine)
    frames = [bytes(writer.write(Heartbeat(float(n), 0, 0, 0))) for n in range(8)]

    def read(number):
        received = reader.read(frames[number])
        return None if received.message is None else received.message.time_s, received.lost

    assert read(0) == (0.0, None)
    assert read(3) == (3.0, (1, 2))  # dropped
    assert read(1) == (None, None)  # late
    assert read(3) == (None, None)  # twice
    assert read(4) == (4.0, None)
    other = FrameReader(b"another!", FromEngine).read(frames[5])
    assert (other.message, other.lost) == (None, (0, 0))
    assert reader.read(frames[5][:18]).lost == (5, 5)  # cut
    assert read(6) == (6.0, None)
    assert reader.num_rejected == 3


def test_unknown_type_or_field_is_not_understood():
    reader = FrameReader(SESSION, ToEngine)
    for number, body in enumerate(
        ({"type": "exec", "code": "1"}, {"type": "stop", "now": True}, {"type": "abort"}, [1], "stop")
    ):
        received = reader.read(HEADER.pack(SESSION, number) + msgspec.msgpack.encode(body))
        assert (received.message, received.lost) == (None, (number, number))
    assert isinstance(reader.read(HEADER.pack(SESSION, 5) + msgspec.msgpack.encode(Stop())).message, Stop)


def test_message_that_cannot_be_sent_takes_no_number():
    writer = FrameWriter(SESSION, max_bytes=100)
    for bad in (Abort(["x" * 101]), Abort(["\ud800"]), Abort([2**70])):
        with pytest.raises(MessageError):
            writer.write(bad)
    frame = bytes(writer.write(Abort(["x"])))
    assert FrameReader(SESSION, ToEngine).read(frame).message == Abort(["x"])
