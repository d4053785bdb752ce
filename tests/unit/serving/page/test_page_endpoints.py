"""The routes of the page: open files with ETags and a content policy; feed, model and tokens need a key."""

import asyncio
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from quire.serving.auth import hash_key
from quire.serving.config import ApiKey
from quire.serving.page.endpoints import page_endpoints
from quire.serving.page.feed import EngineFeed
from quire.serving.page.static_files import FOLDER, POLICY, read_static_files
from tests.unit.serving.fakes import make_served
from tests.unit.serving.http.shell import exchange, running

MAX_PAGE_BYTES = 160_000
"""The page is served whole from memory, uncompressed; a view of timelines took it over 150,000."""


class QuietView:
    is_idle = False

    def start(self): ...
    def stop(self): ...
    def update(self): ...


def get(path, *headers, keys=(), served=None):
    """Return (status, headers, body) of a GET."""
    feed = EngineFeed(SimpleNamespace(watch=lambda hz: None), QuietView())
    api_keys = tuple(ApiKey(name, hash_key(name)) for name in keys)

    async def go():
        async with running(page_endpoints([feed]), api_keys=api_keys) as (port, context):
            context.served = served
            request = "\r\n".join([f"GET {path} HTTP/1.1", "host: localhost", *headers, "", ""]).encode()
            return await exchange(port, request)

    head, _, body = asyncio.run(go()).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return int(status.split()[1]), dict(line.split(": ", 1) for line in lines), body


def test_page_stays_small():
    assert sum(len(file.body) for file in read_static_files()) < MAX_PAGE_BYTES


def test_page_names_no_other_host_and_no_markup_api():
    for file in read_static_files():
        text = file.body.decode()
        hosts = set(re.findall(r"(?:https?:)?//[a-z0-9-]+(?:\.[a-z0-9-]+)+", text)) - {"//www.w3.org", "http://www.w3.org"}
        assert not hosts, file.name
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " style=", 'onclick="'):
            assert forbidden not in text, (file.name, forbidden)


def test_every_import_of_the_page_is_served():
    served = {file.path for file in read_static_files()}
    for file in read_static_files():
        text = file.body.decode()
        if file.name.endswith(".mjs"):
            for name in re.findall(r'from "\./([\w.]+)"', text):
                assert f"/ui/{name}" in served, (file.name, name)
        elif file.name == "index.html":
            for path in re.findall(r'(?:src|href)="([^"#][^"]*)"', text):
                assert f"/{path}" in served, path  # relative: a proxy may have the page behind a prefix


def test_page_asks_for_paths_below_its_own_prefix():
    texts = {file.name: file.body.decode() for file in read_static_files()}
    assert not [name for name, text in texts.items() if name.endswith(".mjs") and name != "api.mjs" and "fetch(" in text]
    assert texts["api.mjs"].count("fetch(") == texts["api.mjs"].count("fetch(urlOf(") == 1
    assert not re.search(r"url\([\"']?/", texts["style.css"])


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/ui/tokens?ids=1,2"])
def test_path_is_resolved_beside_the_folder_of_the_page(path):
    module = (FOLDER / "api.mjs").as_uri()
    script = f"import {{ urlOf }} from {json.dumps(module)}; console.log(urlOf({json.dumps(path)}));"
    ran = subprocess.run(["node", "--input-type=module", "-e", script], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == FOLDER.parent.as_uri() + path


FOLD = """
globalThis.matchMedia = () => ({ matches: false, addEventListener() {} });
const { cellAt, isMostlyEmpty, layout } = await import(MODULE);
const kv = { num_blocks: 1000, blocks_per_cell: 1, runs: [[0, 30, 1, 1], [500, 10, 2, 1], [510, 2, 3, 1]] };
const grid = layout(kv, 180, 1e9, true);
const full = { ...kv, runs: [[0, 251, 1, 1]] };
const bands = grid.bands.map(({ row, rows, y, isFolded }) => [row, rows, y, isFolded]);
console.log(JSON.stringify([bands, cellAt(grid, 5, 60), cellAt(grid, 25, 75), layout(kv, 180, 1e9, false).bands.length,
  isMostlyEmpty(kv), isMostlyEmpty(full)]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_free_rows_of_the_block_map_fold_and_cells_are_found_in_it():
    script = FOLD.replace("MODULE", json.dumps((FOLDER / "charts.mjs").as_uri()))
    ran = subprocess.run(["node", "--input-type=module", "-e", script], capture_output=True, text=True, check=True, timeout=60)
    bands, folded, held, num_bands_unfolded, is_empty, is_full_empty = json.loads(ran.stdout)
    assert bands == [[0, 3, 0, False], [3, 47, 54, True], [50, 2, 70, False], [52, 48, 106, True]]
    assert (folded, held) == ({"index": 30, "count": 470}, {"index": 501, "count": 1})
    assert (num_bands_unfolded, is_empty, is_full_empty) == (1, True, False)


@pytest.mark.parametrize("path, kind", [("/", "text/html"), ("/ui/app.mjs", "text/javascript"), ("/ui/style.css", "text/css")])
def test_file_is_open_and_carries_tag_and_policy_when_the_server_has_keys(path, kind):
    status, headers, body = get(path, keys=["k"])
    assert (status, headers["content-type"].split(";")[0]) == (200, kind)
    assert headers["content-security-policy"] == POLICY
    assert POLICY.startswith("default-src 'self'; ")
    assert "unsafe" not in POLICY
    assert body
    status, again, body = get(path, f"if-none-match: {headers['etag']}", keys=["k"])
    assert (status, again["etag"], body) == (304, headers["etag"], b"")
    assert get(path, 'if-none-match: "other"', keys=["k"])[0] == 200


@pytest.mark.parametrize("path", ["/ui/events", "/ui/model", "/ui/tokens?ids=1"])
def test_what_is_not_static_needs_the_key(path):
    assert get(path, keys=["k"])[0] == 401


def test_unknown_file_is_refused_when_it_leads_outside():
    assert get("/ui/../feed.py")[0] == 404
    assert get("/ui/%2e%2e/feed.py")[0] == 404
    assert get("/ui/nothing.mjs")[0] == 404


def test_model_facts_say_defaults_and_what_the_model_can():
    served = make_served(generation_defaults={"temperature": 0.6})
    status, headers, body = get("/ui/model", "authorization: Bearer k", keys=["k"], served=served)
    facts = json.loads(body)
    assert (status, headers["cache-control"]) == (200, "no-store")
    assert (facts["name"], facts["defaults"], facts["max_model_len"]) == ("demo", {"temperature": 0.6}, 1024)
    assert get("/ui/model")[0] == 503


def test_tokens_have_text_and_bytes():
    served = make_served()
    token_ids = served.tokenizer.encode("Hello wörld", add_special_tokens=False)
    status, _, body = get(f"/ui/tokens?ids={','.join(map(str, token_ids))}", served=served)
    facts = json.loads(body)
    assert status == 200
    assert [fact["id"] for fact in facts] == token_ids
    assert bytes(byte for fact in facts for byte in fact["bytes"]).decode() == "Hello wörld"


@pytest.mark.parametrize(
    "query", ["", "?ids=", "?ids=a", "?ids=-1", "?ids=1,,2", "?ids=999999", "?ids=" + ",".join(["1"] * 257)]
)
def test_token_ids_are_refused_when_they_are_none(query):
    assert get(f"/ui/tokens{query}", served=make_served())[0] == 400


@pytest.mark.parametrize(
    "path, header", [("/ui/events?hz=3", "a: b"), ("/ui/events", "last-event-id: x"), ("/ui/events", "last-event-id: -2")]
)
def test_feed_refuses_a_bad_rate_or_step(path, header):
    assert get(path, header)[0] == 400


def test_static_folder_has_only_files_of_known_kinds():
    assert {path.name for path in FOLDER.iterdir()} == {file.name for file in read_static_files()}


@pytest.mark.parametrize("replica", ["1", "-1", "x", "", "9" * 9])
def test_events_of_a_replica_that_is_not_there_are_refused(replica):
    status, _, body = get(f"/ui/events?replica={replica}")
    assert status == 400
    assert b"replica must be an integer from 0 to 0" in body
