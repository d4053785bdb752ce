"""The page of a router, and the navigation of the engine view, in a real browser."""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.slow

LISTENING = re.compile(r"listening on (http://\S+),")


@contextmanager
def routing(*urls):
    """Start a router of backends; yield its URL."""
    command = [sys.executable, "-m", "quire", "router", "--port", "0", "--admin-key", "admin"]
    command += [*(word for url in urls for word in ("--backend", url)), "--alias", "fast=demo", "--health-interval", "0.2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        yield next(found[1] for line in process.stderr if (found := LISTENING.search(line)))
    finally:
        process.terminate()
        process.communicate(timeout=40)


@pytest.fixture
def router_url(server):
    with routing(server.url) as url:
        yield url


def tabs(browser, selector=".top .tabs"):
    return [element.text for element in browser.all(f"{selector} a")]


def test_router_shows_its_backends_and_answers_chats(browser, server, router_url):
    browser.allowed_errors = ["401", "503"]
    browser.open(f"{router_url}/#router")
    assert tabs(browser) == ["Chat", "Compare", "Completion", "Batches", "Router"]
    browser.labelled("Admin key").send_keys("wrong\n")
    browser.until(lambda: "wants its key" in browser.one("#view-router .note").text, "the refusal")
    browser.labelled("Admin key").clear()
    browser.labelled("Admin key").send_keys("admin\n")
    name = server.url.removeprefix("http://")
    row = "return [...document.querySelectorAll('#view-router tbody tr:first-child > *')].map((cell) => cell.textContent)"
    browser.until(lambda: browser.run(row)[:3] == [name, "ready", "demo"], "the backend")
    assert browser.one("#view-router .note").text == "1 of 1 backends take requests."
    browser.shot("router")
    browser.click(lambda: browser.button("Drain"))
    browser.until(lambda: browser.run(row)[1] == "ready, draining", "a draining backend")
    browser.click(lambda: browser.button("Resume"))
    browser.until(lambda: browser.run(row)[1] == "ready", "a resumed backend")
    browser.until(lambda: browser.all("#model-pick"), "the models")
    browser.one("#model-pick").send_keys("fast")
    browser.until(lambda: browser.run("return sessionStorage.getItem('quire-model')") == "fast", "the choice")
    browser.open(f"{router_url}/#chat")
    browser.until(lambda: browser.all("#model-pick"), "the models")
    browser.until(lambda: browser.labelled("Temperature").get_attribute("placeholder") == "0.8", "what the model can")
    browser.labelled("Max tokens").send_keys("8")
    browser.labelled("Message").send_keys("Hello\n")
    browser.until(lambda: "8 tokens" in browser.run("return document.querySelector('.log').textContent"), "the answer")
    kept = browser.run("return Object.keys(localStorage)")
    assert kept == ["quire-chats /"]
    assert "admin" not in json.dumps(browser.run("return {...localStorage}"))


def test_navigation_of_the_engine_leads_to_ranks_tiers_and_transfers(browser, server):
    browser.open(f"{server.url}/#engine")
    browser.until(lambda: "Engine ready" in browser.one(".engine-state").text, "the feed")
    assert tabs(browser) == ["Chat", "Compare", "Completion", "Batches", "Engine"]
    assert tabs(browser, ".tabs.sub") == ["Overview", "Requests", "Ranks", "Experts", "KV tiers", "KV transfers"]
    parts = {"Ranks": "#card-ranks", "Experts": "#card-experts", "KV tiers": "#card-tiers", "KV transfers": "#card-transfers"}
    for label, selector in parts.items():
        browser.click(lambda label=label: browser.driver.find_element("link text", label))
        shown = [selector]
        browser.until(lambda shown=shown: [one for one in parts.values() if browser.all(one)] == shown, f"the view {label}")
        assert browser.all("canvas.kv") == []
        current = browser.run("return [...document.querySelectorAll('.tabs [aria-current]')].map((link) => link.textContent)")
        assert current == ["Engine", label]
    browser.driver.back()
    assert browser.until(lambda: browser.all("#card-tiers .note"), "the tiers")[0].text.startswith(
        "KV blocks are kept in the pool"
    )
    browser.driver.find_element("link text", "Overview").click()
    assert browser.one("canvas.kv")
    assert "Engine ready" in browser.one(".engine-state").text


SHOW = """
const { EngineModel } = await import(new URL("ui/engine_model.mjs", document.baseURI));
const model = new EngineModel();
model.apply({ now_ms: 0, engine: "ready", phase: "serving", shape: { role: "decode" }, tiers: [
  ["host", 3, 300, 1200, 5, 7, 6, 1, 250, 500, {}, {}],
  ["peer", 0, 0, 1, 5, 0, 6, 0, 0, 500, { short: 2, complete: 4 }, { "tcp://10.0.0.2:7000": "mismatch" }]] }, true);
return model.transfers();"""


def test_transfers_are_read_from_the_feed(browser, scripted):
    browser.open(scripted.url)
    browser.until(lambda: browser.one("#model").text, "the model")
    script = f"const done = arguments[0]; (async () => {{ {SHOW} }})().then(done)"
    assert browser.driver.execute_async_script(script) == {
        "role": "decode",
        "outcomes": [["complete", 4], ["short", 2]],
        "problems": [["tcp://10.0.0.2:7000", "mismatch"]],
    }


EXPERTS = """
const { EngineModel } = await import(new URL("ui/engine_model.mjs", document.baseURI));
const model = new EngineModel();
model.apply({ now_ms: 0, engine: "ready", phase: "serving", experts: [
  [0, 16, 40, [[3, 20], [1, 10]], [30, 10], 1.5, 1.6, 1.02, 2, 1], [1, 16, 40, [[5, 10]], [20, 20], 1, 0, 0, 0, 0]] }, true);
return model.expertRows();"""


def test_experts_are_read_from_the_feed(browser, scripted):
    browser.open(scripted.url)
    browser.until(lambda: browser.one("#model").text, "the model")
    script = f"const done = arguments[0]; (async () => {{ {EXPERTS} }})().then(done)"
    assert browser.driver.execute_async_script(script) == {
        "ranks": [[0, 50, "62.5 %"], [1, 30, "37.5 %"]],
        "layers": [
            [0, 16, 40, "3 (50.0 %), 1 (25.0 %)", "1.50", "1.60 → 1.02", "2 (1 failed)"],
            [1, 16, 40, "5 (25.0 %)", "1.00", "–", 0],
        ],
    }
