"""The chat in a real browser."""

import json

import pytest

from tests.browser.scripted_server import CUT, HOLD, ScriptedServer, chunk, text_chunks

pytestmark = pytest.mark.slow


def say(browser, text):
    browser.labelled("Message").send_keys(text + "\n")


def wait_for_answers(browser, count):
    script = """
    return document.querySelector(".log").ariaBusy === "false"
      && document.querySelectorAll(".msg.assistant").length === arguments[0]"""
    browser.until(lambda: browser.run(script, count), f"{count} answers")


def texts(browser, selector):
    return [element.text for element in browser.all(selector)]


def test_answer_streams_with_figures_and_focus_stays_in_the_input(browser, server):
    browser.open(server.url)
    browser.until(lambda: browser.one("#model").text == "demo", "the model's name")
    assert browser.labelled("Temperature").get_attribute("placeholder") == "0.8"  # of its generation_config.json
    browser.labelled("Max tokens").send_keys("60")
    browser.labelled("System prompt").send_keys("You tell stories.")
    say(browser, "Tell me about a lion.")
    wait_for_answers(browser, 1)
    assert len(browser.one(".msg.assistant .text").text) > 40
    stats = browser.one(".msg.assistant .stats").text
    for part in ("TTFT", "tokens/s", "60 tokens", "cached", "cut at max tokens"):
        assert part in stats
    assert browser.run("return document.activeElement.labels[0].textContent") == "Message"
    assert browser.one(".log").get_attribute("role") == "log"
    browser.shot("chat")


def test_page_works_behind_a_path_prefix(browser):
    with ScriptedServer("/quire") as server:
        server.script = [text_chunks("Here ", "it is.")]
        browser.open(f"{server.url}/")
        browser.until(lambda: browser.one("#model").text == "scripted", "the model's name")
        say(browser, "Where is it?")
        wait_for_answers(browser, 1)
        assert texts(browser, ".msg.assistant .text") == ["Here it is."]


def test_stop_ends_the_stream_when_escape_is_pressed(browser, scripted):
    scripted.script = [[chunk({"content": "Once upon a "}), HOLD]]
    browser.open(scripted.url)
    browser.until(lambda: browser.one("#model").text, "the model")
    say(browser, "Go on.")
    browser.until(lambda: texts(browser, ".msg.assistant .text") == ["Once upon a"], "the first text")
    assert browser.button("Stop")
    browser.press("\ue00c")
    wait_for_answers(browser, 1)
    assert scripted.was_left.wait(30), "the server was not told"
    assert texts(browser, ".msg.assistant .problem") == ["Stopped."]
    assert texts(browser, ".msg.assistant .text") == ["Once upon a"]
    assert browser.one("#status").text == "Stopped."


@pytest.mark.parametrize("way", ["hover", "keyboard"])
def test_likely_tokens_are_listed_when_a_token_is_pointed_at(browser, server, way):
    browser.open(server.url)
    browser.until(lambda: browser.one("#model").text, "the model")
    browser.click(lambda: browser.labelled("Token prob"))
    browser.labelled("Max tokens").send_keys("20")
    say(browser, "Hello")
    wait_for_answers(browser, 1)
    tokens = browser.all(".msg.assistant .tok")
    assert len(tokens) >= 10
    if way == "hover":
        browser.hover(tokens[3])
        browser.shot("hover")
    else:
        browser.run("document.querySelector('.msg.assistant .tok').focus()")
        for _ in range(3):
            browser.press("\ue014")
    card = browser.one(".token-card")
    assert "logprob" in card.text
    assert 5 <= len(card.find_elements("css selector", "li")) <= 6
    assert "%" in tokens[3].get_attribute("aria-label")
    browser.press("\ue00c")
    assert browser.all(".token-card") == []
    assert "Stopped." not in texts(browser, ".msg .problem")


@pytest.mark.parametrize(
    "fault, shown",
    [
        (
            (429, {"retry-after": "7"}, {"error": {"message": "this key is over its rate", "code": "rate_limit_exceeded"}}),
            "429",
        ),
        ((503, {"retry-after": "3"}, {"error": {"message": "the queue is full", "code": "overloaded"}}), "503"),
        ((502, {}, "not the API's own"), "502"),
        ([chunk({"content": "Half a "}), CUT], "cut"),
        ([chunk({"content": "Half a "}), {"error": {"message": "the engine stopped", "code": "engine_error"}}], "engine"),
    ],
    ids=["429", "503", "proxy", "cut", "error-event"],
)
def test_fault_is_told_and_the_request_can_be_made_again(browser, scripted, fault, shown):
    browser.allowed_errors = ["Failed to load resource", "ERR_INCOMPLETE_CHUNKED_ENCODING"]
    scripted.script = [fault, text_chunks("All", " is", " well.")]
    browser.open(scripted.url)
    browser.until(lambda: browser.one("#model").text, "the model")
    say(browser, "Hi")
    if isinstance(fault, list):
        browser.until(lambda: texts(browser, ".msg.assistant .text") == ["Half a"], "the first half")
    scripted.may_cut.set()  # a browser forgets what it had not read when a connection breaks
    wait_for_answers(browser, 1)
    problem = browser.one(".msg.assistant .problem").text
    assert shown in problem
    assert browser.one("#status").text == problem
    if shown == "429":
        assert "Try again in 7 s." in problem
        browser.shot("429")
    if isinstance(fault, list):
        assert browser.one(".msg.assistant .text").text == "Half a"
    browser.click(lambda: browser.button("Try again"))
    browser.until(lambda: texts(browser, ".msg.assistant .text") == ["All is well."], "the second answer")
    wait_for_answers(browser, 1)
    assert browser.all(".msg .problem") == []
    assert [message["role"] for message in scripted.bodies[1]["messages"]] == ["user"]


def test_parameters_are_sent_only_when_they_are_given(browser, scripted):
    scripted.script = [text_chunks("a"), text_chunks("b")]
    browser.open(scripted.url)
    browser.until(lambda: browser.one("#model").text, "the model")
    say(browser, "One")
    wait_for_answers(browser, 1)
    assert scripted.bodies[0].keys() == {"model", "messages", "stream", "stream_options"}
    for name, value in {"Temperature": "0.25", "Top k": "5", "Seed": "7", "Max tokens": "9", "Min p": "0.1"}.items():
        browser.labelled(name).send_keys(value)
    browser.labelled("Stop strings").send_keys("END\nSTOP")
    browser.labelled("System prompt").send_keys("Be brief.")
    say(browser, "Two")
    wait_for_answers(browser, 2)
    body = scripted.bodies[1]
    assert {name: body[name] for name in ("temperature", "top_k", "seed", "max_completion_tokens", "min_p", "stop")} == {
        "temperature": 0.25,
        "top_k": 5,
        "seed": 7,
        "max_completion_tokens": 9,
        "min_p": 0.1,
        "stop": ["END", "STOP"],
    }
    assert [message["content"] for message in body["messages"]] == ["Be brief.", "One", "a", "Two"]


def test_history_is_cut_when_a_message_is_edited_or_an_answer_regenerated(browser, scripted):
    scripted.script = [text_chunks("first"), text_chunks("second"), text_chunks("again"), text_chunks("edited")]
    browser.open(scripted.url)
    browser.until(lambda: browser.one("#model").text, "the model")
    for count, text in enumerate(("One", "Two"), 1):
        say(browser, text)
        wait_for_answers(browser, count)
    browser.all(".msg.assistant")[-1].find_elements("xpath", ".//button[.='Regenerate']")[0].click()
    browser.until(lambda: texts(browser, ".msg .text")[-1:] == ["again"], "the new answer")
    wait_for_answers(browser, 2)
    assert [message["content"] for message in scripted.bodies[2]["messages"]] == ["One", "first", "Two"]
    browser.click(lambda: browser.button("Edit"))
    field = browser.one(".msg textarea")
    field.clear()
    field.send_keys("Other")
    browser.click(lambda: browser.button("Send again"))
    browser.until(lambda: texts(browser, ".msg .text") == ["Other", "edited"], "the edited turn")
    assert [message["content"] for message in scripted.bodies[3]["messages"]] == ["Other"]


def test_reasoning_is_folded_and_tool_calls_are_answered_by_hand(browser, scripted):
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    scripted.script = [
        [
            chunk({"reasoning_content": "The user wants "}),
            chunk({"reasoning_content": "the weather."}),
            chunk({"content": "I look it up."}),
            chunk({"tool_calls": [call]}),
            chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]}),
            chunk({"tool_calls": [{"index": 0, "function": {"arguments": '"Bern"}'}}]}),
            chunk({}, "tool_calls"),
        ],
        text_chunks("Sunny", "."),
    ]
    browser.open(scripted.url)
    browser.until(lambda: browser.one("#model").text, "the model")
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    browser.labelled("Tools").send_keys(json.dumps([tool]))
    say(browser, "Weather in Bern?")
    wait_for_answers(browser, 1)
    assert scripted.bodies[0]["tools"] == [tool]
    assert "The user wants" not in browser.one(".msg.assistant").text  # folded
    browser.click(lambda: browser.one(".reasoning summary"))
    assert "The user wants the weather." in browser.one(".reasoning").text
    assert '"city": "Bern"' in browser.one(".call pre").text
    browser.shot("tools")
    browser.labelled("Answer by hand").send_keys("22 degrees")
    browser.click(lambda: browser.button("Send the result"))
    wait_for_answers(browser, 2)
    assert scripted.bodies[1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": "I look it up.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
            ],
        },
        {"role": "tool", "content": "22 degrees", "tool_call_id": "call_1"},
    ]


MARKDOWN = """# Title

Some **bold**, *slanted* and `code <b>`; a [link](https://example.org/x).

- one
- two
  - nested

1. first
2. second

| a | b |
|---|---|
| 1 | 2 |

> quoted

```python
print("<hi>")
```

<img src=x onerror="document.title='hacked'"><script>document.title="hacked"</script>
[bad](javascript:document.title='hacked')"""


def test_markdown_is_rendered_and_markup_stays_text(browser, scripted):
    scripted.script = [text_chunks(*(MARKDOWN[at : at + 7] for at in range(0, len(MARKDOWN), 7)))]
    browser.open(scripted.url)
    browser.until(lambda: browser.one("#model").text, "the model")
    say(browser, "Show me")
    wait_for_answers(browser, 1)
    found = browser.run("""
    const text = document.querySelector(".msg.assistant > .text");
    const count = (selector) => text.querySelectorAll(selector).length;
    return [count("h4"), count("strong"), count("em"), count("li"), count("ol > li"), count("td"), count("blockquote"),
            text.querySelector("pre").textContent, count("img, script"), count("a"), text.querySelector("a").rel]""")
    assert found == [1, 1, 1, 5, 2, 2, 1, 'print("<hi>")', 0, 1, "noreferrer noopener"]
    assert "onerror" in browser.one(".msg.assistant .text").text
    assert browser.driver.title == "Chat · quire"
    browser.shot("markdown")
