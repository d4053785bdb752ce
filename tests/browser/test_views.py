"""Completion, the engine view, keys, keyboard, small and dark screens, in a real browser."""

import json
import threading
import urllib.request

import pytest

from tests.browser.conftest import ServerProcess
from tests.browser.scripted_server import text_chunks

pytestmark = pytest.mark.slow

PREFIX = "A long time ago there lived an old lion in the deep forest, and all the animals were afraid. " * 4
ESCAPE, TAB, ENTER, RIGHT, DOWN, LEFT = "\ue00c", "\ue004", "\ue007", "\ue014", "\ue015", "\ue012"


def ask(url, prompt, num_tokens):
    body = {"model": "demo", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


class Load:
    """Two requests of one prefix, again and again until the end of the block."""

    def __init__(self, url):
        self.url = url
        self.is_over = threading.Event()
        self.threads = [threading.Thread(target=self.ask, args=(name,)) for name in ("Once", "Then")]

    def ask(self, name):
        while not self.is_over.is_set():
            ask(self.url, PREFIX + name, 700)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *args):
        self.is_over.set()
        for thread in self.threads:
            thread.join()


def complete(browser, text, num_tokens=24):
    browser.until(lambda: browser.one("#model").text, "the model")
    browser.labelled("Temperature").send_keys("0")
    browser.labelled("Max tokens").send_keys(str(num_tokens))
    browser.labelled("Text").send_keys(text)
    browser.click(lambda: browser.button("Continue"))
    wait_until_done(browser)


def wait_until_done(browser):
    busy = "return document.querySelector('#view-completion .tokens').ariaBusy"
    browser.until(lambda: browser.run(busy) == "false" and browser.all("#view-completion .tok.p-none, .tok"), "the end")


def document_text(browser):
    return browser.run("return document.querySelector('#view-completion .tokens').textContent")


def test_token_is_replaced_and_the_text_goes_on_when_another_is_chosen(browser, server):
    browser.open(f"{server.url}/#completion")
    complete(browser, "Once upon a time there was")
    before = browser.run("return [...document.querySelectorAll('#view-completion .tokens .tok')].map((e) => e.textContent)")
    assert before[0] == "Once upon a time there was"
    assert len(before) == 25
    browser.run("document.querySelector('#view-completion .tokens .tok').focus()")
    for _ in range(4):
        browser.press(RIGHT)
    browser.until(lambda: "bytes" in browser.one(".token-card").text, "the bytes of the token")
    browser.press(ENTER)
    browser.press(DOWN)
    browser.shot("alternatives")
    chosen = (
        browser.run("return document.activeElement.querySelector('.what').textContent").replace("␣", " ").replace("⏎", "\n")
    )
    assert chosen != before[4]
    browser.press(ENTER)
    browser.until(lambda: document_text(browser).startswith("".join(before[:4]) + chosen), "the replaced token")
    wait_until_done(browser)
    after = browser.run("return [...document.querySelectorAll('#view-completion .tokens .tok')].map((e) => e.textContent)")
    assert after[:5] == [*before[:4], chosen]
    assert len(after) == 5 + 24
    assert "cached" in browser.one("#view-completion .stats").text
    browser.shot("replaced")


def test_text_can_be_edited_and_scored(browser, server):
    browser.open(f"{server.url}/#completion")
    complete(browser, "The old", 5)
    browser.click(lambda: browser.button("Edit text"))
    field = browser.labelled("Text")
    assert field.get_attribute("value") == document_text(browser)
    field.clear()
    field.send_keys("A young fox")
    browser.click(lambda: browser.labelled("Score"))
    browser.click(lambda: browser.button("Continue"))
    browser.until(lambda: document_text(browser).startswith("A young fox"), "the new text")
    wait_until_done(browser)
    scored = browser.run("return [...document.querySelectorAll('#view-completion .tokens .tok')].map((e) => e.className)")
    assert "p-none" in scored[0]  # nothing comes before the first token
    assert not any("p-none" in name for name in scored[1:])
    assert len(scored) > 6


def test_engine_view_shows_the_batch_and_shared_blocks_when_two_requests_have_one_prefix(browser, server):
    browser.open(f"{server.url}/#engine", height=1500)
    for selector in ("#card-steps", "#card-kv", "#card-timeline", "#card-rate", "#card-ttft", "#card-queue"):
        browser.click(lambda selector=selector: browser.one(f"{selector} summary"))
    rows = """
    const rows = [...document.querySelectorAll(`#card-${arguments[0]} .twin tbody tr`)];
    return rows.map((row) => [...row.children].map((cell) => cell.textContent))"""

    def table(name):
        return browser.run(rows, name)

    def shared():
        held = [row for row in table("kv") if row[0] != "cached" and int(row[3]) > 0]
        return held if len(held) == 2 else None

    with Load(server.url):
        held = browser.until(shared, "shared blocks")
        browser.shot("engine")
        assert all(int(row[2]) > int(row[3]) > 0 for row in held)
        assert held[0][3] == held[1][3]
        browser.until(lambda: any(int(row[3]) >= 2 for row in table("steps")), "two decoding in one step")
        browser.until(lambda: any(int(row[7]) > 0 for row in table("timeline")), "a request with cached tokens")
        browser.until(lambda: any(int(row[2]) > 0 for row in table("rate")), "decode tokens")
        browser.until(lambda: table("ttft"), "times to first token")
        browser.until(lambda: any(int(row[2]) >= 2 for row in table("queue")), "two sequences that run at once")
    assert "Engine ready" in browser.one(".engine-state").text
    painted = browser.run("""
    return [...document.querySelectorAll(".card canvas:not(.swatch)")].map((canvas) => {
      const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      return pixels.some((value) => value > 0);
    })""")
    assert painted == [True] * 6
    browser.click(lambda: browser.one("canvas.steps"))
    browser.press(LEFT)
    browser.until(lambda: browser.one("#card-steps .note").text.startswith("Step "), "the step that is read out")
    browser.one("#card-steps select").send_keys("16")
    browser.click(lambda: browser.one("canvas.steps"))
    browser.press(LEFT)
    browser.until(lambda: " on average " in browser.one("#card-steps .note").text, "the bar that is read out")
    browser.shot("engine-16")
    browser.click(lambda: browser.button("Pause"))
    assert browser.one(".engine-state").text == "Paused"


def test_timeline_of_a_request_is_shown_with_its_phases_and_events(browser, server):
    browser.open(f"{server.url}/#completion")
    complete(browser, "The old", 5)
    browser.run("location.hash = '#engine/requests'")
    browser.until(lambda: browser.all("#card-requests tbody button"), "the list")
    browser.click(lambda: browser.one("#card-requests tbody button"))
    text = browser.until(lambda: browser.one("#card-requests").text, "the timeline")
    assert "Where the time went" in text
    for event in ("received", "admitted: ", "prefill: ", "decode: ", "finished: length, 5 output tokens"):
        assert event in text
    assert len(browser.all("#card-requests .lanes i.prefill")) >= 1
    widths = browser.run("return [...document.querySelectorAll('#card-requests .lanes i')].map((bar) => bar.style.width)")
    assert all(width.endswith("%") for width in widths)
    browser.shot("requests")
    browser.click(lambda: browser.button("Refresh"))
    browser.until(lambda: "that ended" in browser.one("#card-requests .note").text, "the note")


def test_feed_is_slow_when_motion_is_unwanted_and_ends_when_the_view_is_left(browser, server):
    opened = """
    const real = window.fetch;
    window.opened = [];
    window.fetch = (path, options) => { window.opened.push([path, options]); return real(path, options); };"""
    for calm in (True, False):
        browser.open(f"{server.url}/#chat", calm=calm)
        browser.until(lambda: browser.one("#model").text, "the model")
        browser.run(opened)
        browser.run("location.hash = '#engine'")
        browser.until(lambda: "Engine ready" in browser.one(".engine-state").text, "the snapshot")
        opened_url = browser.run("return window.opened.map(([url]) => String(url))")[0]
        assert opened_url.removeprefix(server.url) == f"/ui/events?hz={1 if calm else 10}&replica=0"
        browser.run("location.hash = '#chat'")
        browser.until(lambda: browser.run("return window.opened[0][1].signal.aborted"), "the end of the feed")
    browser.open(f"{server.url}/#chat", calm=True)
    assert browser.run("return getComputedStyle(document.querySelector('button')).transitionDuration") == "0s"


def batch_file(folder, num, max_tokens):
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True}
    lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n in range(num)]
    path = folder / "in.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def test_batch_is_started_watched_and_cancelled(browser, server, tmp_path):
    browser.open(f"{server.url}/#batches")
    row = "return [...document.querySelectorAll('#view-batches tbody tr:first-child > *')].map((cell) => cell.textContent)"
    browser.until(lambda: browser.run(row) == ["None yet."], "the list")

    def start(num, max_tokens):
        browser.labelled("File").send_keys(batch_file(tmp_path, num, max_tokens))
        browser.labelled("Route").send_keys("/v1/completions")
        browser.button("Start").click()
        browser.until(lambda: "Started batch_" in browser.one("#view-batches .note").text, "the note")

    start(3, 4)
    browser.until(lambda: browser.run(row)[2:4] == ["completed", " 3 of 3"], "the end of a batch")
    assert browser.run("return document.querySelector('#view-batches progress').position") == 1
    browser.run(
        "const real = URL.createObjectURL; URL.createObjectURL = (blob) => { window.blob = blob; return real.call(URL, blob); }"
    )
    browser.button("Answers").click()
    browser.until(lambda: browser.run("return window.blob !== undefined"), "the answers")
    text = browser.driver.execute_async_script("window.blob.text().then(arguments[0])")
    assert [json.loads(line)["response"]["status_code"] for line in text.splitlines()] == [200] * 3
    start(500, 900)
    browser.until(lambda: browser.run(row)[2] == "in progress", "a batch that runs")
    browser.shot("batches")
    browser.button("Cancel").click()
    browser.until(lambda: browser.run(row)[2] == "cancelled", "the end of the cancelled batch")
    assert "500 of 500" in browser.run(row)[3]
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"custom_id": "a"}')
    browser.labelled("File").send_keys(str(bad))
    browser.button("Start").click()
    browser.until(lambda: browser.run(row)[2] == "failedline 1: method is required", "the error of a line")
    browser.open(f"{server.url}/#batches", width=360, height=740)
    browser.until(lambda: "failed" in browser.one("#view-batches tbody").text, "the list")
    assert browser.run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    browser.shot("phone-batches")


def test_example_of_a_route_is_shown_and_started(browser, server):
    browser.open(f"{server.url}/#batches")
    browser.until(lambda: browser.one("#model").text, "the model")
    browser.labelled("Route").send_keys("/v1/completions")
    browser.click(lambda: browser.one("#view-batches .examples summary"))
    lines = [json.loads(line) for line in browser.one("#view-batches .examples pre").text.splitlines()]
    assert [(line["custom_id"], line["url"], line["body"]["model"]) for line in lines] == [
        (f"example-{number}", "/v1/completions", "demo") for number in (1, 2, 3)
    ]
    browser.shot("batch-example")
    browser.click(lambda: browser.button("Start the example"))
    row = "return [...document.querySelectorAll('#view-batches tbody tr:first-child > *')].map((cell) => cell.textContent)"
    browser.until(lambda: browser.run(row)[1:4] == ["/v1/completions", "completed", " 3 of 3"], "the end of the example")


NUM_FREE = "return Number(/ (\\d+) free/.exec(document.querySelector('#card-kv .note').textContent)?.[1] ?? 0)"


@pytest.fixture
def forgetful_server(chromium):
    """A server without a prefix cache, so that blocks become free again."""
    started = ServerProcess("--max-num-seqs", "8", "--no-enable-prefix-caching")
    started.wait_until_ready()
    yield started
    started.stop()


def test_map_of_blocks_folds_when_it_is_mostly_empty(browser, forgetful_server):
    server = forgetful_server
    browser.open(f"{server.url}/#engine", height=1500)
    browser.until(lambda: "Engine ready" in browser.one(".engine-state").text, "the feed")
    tall = "return document.querySelector('canvas.kv').clientHeight"
    with Load(server.url):
        browser.until(lambda: browser.run(NUM_FREE) > 0, "blocks")
        browser.until(lambda: browser.all("#card-kv .control button"), "the button")
        folded = browser.run(tall)
        browser.shot("kv-folded")
        browser.click(lambda: browser.button("Show all blocks"))
        whole = browser.until(lambda: browser.run(tall) > 2 * folded and browser.run(tall), "the whole map")
        browser.click(lambda: browser.button("Fold free rows"))
        browser.until(lambda: browser.run(tall) < whole, "the folded map")  # how much folds changes with the blocks in use
    from selenium.webdriver.common.action_chains import ActionChains

    def points_at_folded_blocks():
        down = browser.run(tall) // 2 - 6  # the map shrinks as blocks become free
        for offset in (0, 5):  # the page listens to moves
            ActionChains(browser.driver).move_to_element_with_offset(browser.one("canvas.kv"), offset, down).perform()
        return browser.one("#card-kv .note").text.endswith(": free.")

    browser.until(points_at_folded_blocks, "the folded blocks")
    assert browser.one("#card-kv .note").text.startswith("Blocks ")


def test_key_is_asked_for_and_kept_in_the_tab_alone(browser, guarded_server):
    browser.allowed_errors = ["401"]
    browser.open(guarded_server.url)
    field = browser.one("#key-input")
    assert browser.run("return document.activeElement.id") == "key-input"
    field.send_keys("wrong\n")
    browser.until(lambda: "refused" in browser.one("#key-text").text, "the complaint")
    browser.shot("key")
    browser.one("#key-input").send_keys("open-sesame\n")
    browser.until(lambda: browser.one("#model").text == "demo", "the model's name")
    assert browser.run("return [sessionStorage.getItem('quire-api-key'), localStorage.length, document.cookie]") == [
        "open-sesame",
        0,
        "",
    ]
    browser.run("location.hash = '#engine'")
    browser.until(lambda: "Engine ready" in browser.one(".engine-state").text, "the feed")
    browser.click(lambda: browser.button("API key"))
    browser.click(lambda: browser.button("Forget"))
    assert browser.run("return sessionStorage.length") == 0


def test_everything_is_reached_when_there_is_only_a_keyboard(browser, server):
    browser.open(server.url)
    browser.until(lambda: browser.one("#model").text, "the model")
    browser.press(TAB)
    assert browser.focused() == "Skip to the content"
    browser.press(ENTER)
    assert browser.run("return document.activeElement.id") == "main"
    browser.tab_to("Message")
    browser.press("Hello")
    browser.tab_to("Max tokens")
    browser.press("12")
    browser.run("document.activeElement.blur(); scrollTo(0, 0)")
    browser.tab_to("Message")
    browser.press(ENTER)
    browser.until(lambda: "12 tokens" in browser.run("return document.querySelector('.log').textContent"), "the answer")
    browser.run("document.activeElement.blur()")
    browser.tab_to("Completion")
    browser.press(ENTER)
    browser.until_in("Text")
    browser.press("A fox and a crow")
    browser.tab_to("Continue")
    browser.press(ENTER)
    browser.until(lambda: browser.all("#view-completion .tokens .tok"), "the tokens")
    wait_until_done(browser)
    browser.run("document.activeElement.blur()")
    browser.tab_to("Engine")
    browser.press(ENTER)
    browser.until(lambda: "Engine ready" in browser.one(".engine-state").text, "the feed")
    ask(server.url, "Then", 8)  # earlier steps had no viewer
    browser.tab_to("Steps of the engine")

    def is_read_out():
        browser.press(LEFT)
        return browser.one("#card-steps .note").text.startswith("Step ")

    browser.until(is_read_out, "the step that is read out")
    ring = browser.run("const s = getComputedStyle(document.activeElement); return [s.outlineStyle, s.outlineWidth]")
    assert ring == ["solid", "2px"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_fits_a_phone(browser, server, dark):
    fits = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    browser.open(server.url, width=360, height=740, dark=dark)
    browser.until(lambda: browser.one("#model").text, "the model")
    browser.click(lambda: browser.one("#view-chat aside summary"))
    browser.labelled("Max tokens").send_keys("40")
    browser.click(lambda: browser.labelled("Token prob"))
    browser.click(lambda: browser.one("#view-chat aside summary"))
    browser.labelled("Message").send_keys("Tell me a story\n")
    browser.until(lambda: "40 tokens" in browser.run("return document.querySelector('.log').textContent"), "the answer")
    assert browser.run(fits)
    browser.shot("phone-chat")
    browser.run("location.hash = '#completion'")
    browser.labelled("Text").send_keys("A_very_long_word_without_any_place_to_break_it_that_is_wider_than_the_phone ")
    browser.click(lambda: browser.button("Continue"))
    browser.until(lambda: browser.all("#view-completion .tokens .tok"), "the tokens")
    wait_until_done(browser)
    # What stands below the text is not beneath it.
    assert browser.run("const b = document.querySelector('#view-completion .tokens'); return b.scrollHeight <= b.clientHeight")
    # The last tokens may be line breaks, which have no width to click.
    browser.click(lambda: [token for token in browser.all("#view-completion .tokens .tok") if token.size["width"] > 2][-1])
    browser.until(lambda: "bytes" in browser.one(".token-card").text, "the card")
    assert browser.run(
        "const box = document.querySelector('.token-card').getBoundingClientRect(); return box.left >= 0 && box.right <= 360"
    )
    assert browser.run(fits)
    browser.shot("phone-completion")
    browser.run("location.hash = '#engine'")
    browser.until(lambda: "Engine ready" in browser.one(".engine-state").text, "the feed")
    browser.shot("phone-engine")
    for summary in browser.all("details.twin summary"):
        browser.click(lambda summary=summary: summary)
    assert browser.run(fits)


CONTRAST = """
const style = getComputedStyle(document.documentElement);
const light = (name) => {
  const hex = style.getPropertyValue(name).trim();
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const [a, b] = [light(arguments[0]), light(arguments[1])];
return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_contrast_is_enough_in_either_scheme(browser, scripted, dark):
    scripted.script = [text_chunks("Some", " text", " and `code`.")]
    browser.open(scripted.url, dark=dark)
    browser.until(lambda: browser.one("#model").text, "the model")
    browser.labelled("Message").send_keys("Hi\n")
    browser.until(lambda: "3 tokens" in browser.run("return document.querySelector('.log').textContent"), "the answer")
    browser.shot("chat")
    for ink in ("--text", "--dim", "--accent", "--warn"):
        for ground in ("--bg", "--surface", "--raised"):
            assert browser.run(CONTRAST, ink, ground) >= 4.5, (ink, ground)
    for ink, ground in (("--on-accent", "--accent"), ("--text", "--warn-soft"), ("--text", "--accent-soft")):
        assert browser.run(CONTRAST, ink, ground) >= 4.5, (ink, ground)
    for mark in ("--edge", "--prefill", "--decode", "--queue", *(f"--o{number}" for number in range(8))):
        assert browser.run(CONTRAST, mark, "--surface") >= 3, mark
    red = browser.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    assert (int(red) < 60) == dark
