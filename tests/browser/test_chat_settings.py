"""Kept chats, the format of answers and the comparison of two settings, in a real browser."""

import json

import pytest

from tests.browser.scripted_server import HOLD, ScriptedServer, chunk, text_chunks
from tests.browser.test_chat_page import say, texts, wait_for_answers

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}


def open_page(browser, url, view="chat"):
    browser.open(f"{url}/#{view}")
    browser.until(lambda: browser.one("#model").text, "the model")


def reload(browser):
    browser.driver.refresh()
    browser.until(lambda: browser.one("#model").text, "the model")


def chats(browser):
    options = browser.run("return [...document.querySelectorAll('.history option')].map((option) => option.textContent)")
    return options[1:]  # the first is a new chat


def choose(browser, control, text):
    script = """
    const [select, text] = arguments;
    select.value = [...select.options].find((option) => option.textContent === text).value;
    select.dispatchEvent(new Event("change", { bubbles: true }));"""
    browser.run(script, browser.labelled(control), text)


def test_chats_survive_a_reload_and_are_deleted(browser, scripted):
    scripted.script = [text_chunks("Hello", " **Ann**."), text_chunks("Again."), text_chunks("Other."), text_chunks("More.")]
    open_page(browser, scripted.url)
    browser.labelled("System prompt").send_keys("Be brief.")
    say(browser, "I am Ann")
    wait_for_answers(browser, 1)
    reload(browser)
    assert texts(browser, ".msg > .text") == ["I am Ann", "Hello Ann."]
    assert "2 tokens" in browser.one(".msg.assistant .stats").text
    assert browser.labelled("System prompt").get_attribute("value") == "Be brief."
    say(browser, "Who am I?")
    wait_for_answers(browser, 2)
    sent = [message["content"] for message in scripted.bodies[1]["messages"]]
    assert sent == ["Be brief.", "I am Ann", "Hello **Ann**.", "Who am I?"]
    browser.click(lambda: browser.button("New chat"))
    assert texts(browser, ".msg > .text") == []
    say(browser, "Something else")
    wait_for_answers(browser, 1)
    assert chats(browser) == ["Something else", "I am Ann"]
    choose(browser, "Chats in this browser", "I am Ann")
    assert texts(browser, ".msg > .text") == ["I am Ann", "Hello Ann.", "Who am I?", "Again."]
    browser.shot("chats")
    browser.click(lambda: browser.button("Delete chat"))
    assert (chats(browser), texts(browser, ".msg > .text")) == (["Something else"], [])
    browser.click(lambda: browser.button("Delete all chats"))
    browser.driver.switch_to.alert.accept()
    assert browser.until(lambda: browser.one("#status").text == "All chats are deleted.", "the status")
    assert browser.run("return localStorage.length") == 0
    reload(browser)
    assert (chats(browser), texts(browser, ".msg > .text")) == ([], [])


def test_answer_that_a_reload_cut_is_kept_with_a_problem(browser, scripted):
    scripted.script = [[chunk({"content": "Once upon a "}), HOLD], text_chunks("All of it.")]
    open_page(browser, scripted.url)
    say(browser, "Go on.")
    browser.until(lambda: texts(browser, ".msg.assistant .text") == ["Once upon a"], "the first text")
    reload(browser)
    assert texts(browser, ".msg.assistant .text") == ["Once upon a"]
    assert "before the answer was complete" in browser.one(".msg.assistant .problem").text
    browser.click(lambda: browser.button("Try again"))
    browser.until(lambda: texts(browser, ".msg.assistant .text") == ["All of it."], "the second answer")


def test_chats_are_kept_apart_when_two_servers_share_an_origin(browser):
    with ScriptedServer("/one") as server:
        server.script = [text_chunks("Hello.")]
        open_page(browser, server.url)
        say(browser, "Hi")
        wait_for_answers(browser, 1)
        assert chats(browser) == ["Hi"]
        server.prefix = "/two"
        open_page(browser, server.url)
        assert chats(browser) == []


def test_oldest_chats_make_room_when_the_storage_is_full(browser, scripted):
    scripted.script = [text_chunks("x" * 2000), text_chunks("Fine.")]
    open_page(browser, scripted.url)
    say(browser, "Old one")
    wait_for_answers(browser, 1)
    fill = """
    for (let size = 1 << 24, kept = ""; size > 100; size >>= 1) {
      try {
        localStorage.setItem("filler", kept + "x".repeat(size));
        kept += "x".repeat(size);
      } catch {}
    }"""
    browser.run(fill)
    browser.click(lambda: browser.button("New chat"))
    say(browser, "Young one " + "y" * 1000)
    wait_for_answers(browser, 1)
    assert chats(browser) == ["Young one " + "y" * 30]
    assert texts(browser, ".msg.assistant .text") == ["Fine."]


def test_response_format_and_tool_choice_are_sent(browser, scripted):
    scripted.script = [text_chunks("{}"), text_chunks("{}"), text_chunks("{}")]
    open_page(browser, scripted.url)
    choose(browser, "Response format", "JSON object")
    say(browser, "One")
    wait_for_answers(browser, 1)
    assert scripted.bodies[0]["response_format"] == {"type": "json_object"}
    choose(browser, "Response format", "JSON schema")
    browser.labelled("Schema").send_keys("{")
    say(browser, "Two")
    assert browser.one("#status").text.startswith("The schema is not valid JSON: ")
    assert len(scripted.bodies) == 1
    browser.labelled("Schema").clear()
    browser.labelled("Schema").send_keys(json.dumps(SCHEMA))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    browser.labelled("Tools").send_keys(json.dumps([tool]))
    choose(browser, "Tool choice", "at least one call")
    say(browser, "Three")
    wait_for_answers(browser, 2)
    body = scripted.bodies[1]
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA},
    }
    assert (body["tools"], body["tool_choice"]) == ([tool], "required")
    browser.labelled("Tools").clear()
    choose(browser, "Response format", "Text")
    say(browser, "Four")
    wait_for_answers(browser, 3)
    assert scripted.bodies[2].keys() == {"model", "messages", "stream", "stream_options"}


def test_answer_follows_a_schema(browser, server):
    open_page(browser, server.url)
    choose(browser, "Response format", "JSON schema")
    browser.labelled("Schema").send_keys(json.dumps(SCHEMA))
    say(browser, "A number, please")
    wait_for_answers(browser, 1)
    found = json.loads(browser.one(".msg.assistant .text").text)
    assert found.keys() == {"n"}
    assert 0 <= found["n"] <= 9


def field(browser, side, label):
    script = """
    const [index, text] = arguments;
    return [...document.querySelectorAll(".compare-side")[index].querySelectorAll("label")].find(
      (label) => label.textContent.startsWith(text)).control"""
    return browser.run(script, side, label)


def test_two_settings_are_compared_for_one_prompt(browser, server):
    open_page(browser, server.url, "compare")
    for side, seed in enumerate(("1", "2")):
        field(browser, side, "Max tokens").send_keys("24")
        field(browser, side, "Seed").send_keys(seed)
        field(browser, side, "Temperature").send_keys("1.5")
    browser.labelled("Prompt").send_keys("Tell me about a lion.")
    note = "return document.querySelector('#view-compare .note').textContent"
    browser.click(lambda: browser.button("Compare"))
    browser.until(lambda: browser.run(note).startswith("The answers"), "the difference")
    first, second = texts(browser, "#view-compare .msg > .text")
    assert first != second
    assert all("24 tokens" in text for text in texts(browser, "#view-compare .stats"))
    assert browser.run("return [...document.querySelectorAll('#view-compare .msg')].map((e) => e.ariaLabel)") == [
        "Answer A",
        "Answer B",
    ]
    browser.shot("compare")
    field(browser, 1, "Seed").clear()
    field(browser, 1, "Seed").send_keys("1")
    browser.click(lambda: browser.button("Compare"))
    browser.until(lambda: browser.run(note) == "Both answers are the same text.", "equal answers")
    field(browser, 1, "Seed").clear()
    browser.run(
        "arguments[0].value = 'json_schema'; arguments[0].dispatchEvent(new Event('change'))", field(browser, 1, "Response")
    )
    field(browser, 1, "Schema").send_keys("{")
    browser.click(lambda: browser.button("Compare"))
    browser.until(lambda: browser.one("#status").text.startswith("Settings B: The schema is not valid JSON"), "the complaint")


def test_comparison_is_stopped_with_escape_and_fits_a_phone(browser, scripted):
    scripted.script = [[chunk({"content": "Half"}), HOLD], [chunk({"content": "Half"}), HOLD]]
    browser.open(f"{scripted.url}/#compare", width=360, height=740)
    browser.until(lambda: browser.one("#model").text, "the model")
    browser.labelled("Prompt").send_keys("Go on.")
    browser.click(lambda: browser.button("Compare"))
    browser.until(lambda: texts(browser, "#view-compare .msg > .text") == ["Half", "Half"], "both halves")
    browser.press("\ue00c")
    browser.until(lambda: texts(browser, "#view-compare .problem") == ["Stopped.", "Stopped."], "the end")
    assert browser.run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    browser.shot("phone-compare")
