"""Responses with many log probabilities are encoded outside of the event loop."""

import threading

import pytest

from quire.serving.engine_client.messages import ChoiceDelta
from quire.serving.responses import create
from tests.unit.serving.fakes import fake_logprobs
from tests.unit.serving.real_app import events_of
from tests.unit.serving.responses.asking_responses import CALL, TOKENIZER, TOOL, ask

LARGE_BYTES = 64 << 10
NUM_TOKENS = 600


def play(job):
    """Say many words, then call a tool."""
    (word,) = TOKENIZER.encode(" a", add_special_tokens=False)[:1]
    num_top = job.request.params.logprobs
    piece = TOKENIZER.decode([word])
    deltas = [[ChoiceDelta(0, piece, [word], [fake_logprobs(word, num_top)])] for _ in range(NUM_TOKENS)]
    for token_id in TOKENIZER.encode(CALL, add_special_tokens=False):
        deltas.append(
            [
                ChoiceDelta(
                    0, TOKENIZER.decode([token_id], skip_special_tokens=False), [token_id], [fake_logprobs(token_id, num_top)]
                )
            ]
        )
    return [*deltas, [ChoiceDelta(0, "", [0], [fake_logprobs(0, num_top)], finish_reason="stop")]]


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "stream"])
def test_long_answer_is_encoded_in_a_thread(monkeypatch, is_streaming):
    on_loop, in_threads = [0], [0]

    def watch(name):
        encode = getattr(create, name)

        def watched(item):
            found = encode(item)
            (on_loop if threading.current_thread() is threading.main_thread() else in_threads).append(len(found))
            return found

        monkeypatch.setattr(create, name, watched)

    watch("encode_json")
    watch("named_frame")
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 5, "tools": [TOOL], "stream": is_streaming}
    answer, _ = ask(play, **wanted)
    found = events_of(answer.text)[-1][1]["response"] if is_streaming else answer.json()
    assert len(found["output"][0]["content"][0]["logprobs"]) >= NUM_TOKENS
    assert len(answer.content) > LARGE_BYTES
    assert max(on_loop) <= LARGE_BYTES < max(in_threads)
