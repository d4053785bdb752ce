"""Which combinations of the heads' tests are slow: each kind runs on one model and cache, all of them with -m slow."""

import zlib

import pytest

HEADS = ("eagle", "mtp", "medusa")
RUN_ALWAYS = ("eagle3", "medusa", "medusa tree")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    groups = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        kind = str(params.get("kind", ""))
        is_head = {"tiny_family", "cache"} <= params.keys() and kind.startswith(HEADS) and kind not in RUN_ALWAYS
        if is_head and (not kind.startswith("mtp") or params["tiny_family"] in ("qwen3", "mistral")):
            groups.setdefault((item.originalname, kind, str(params.get("options"))), []).append(item)
    for key, group in groups.items():
        chosen = zlib.crc32(repr(key).encode()) % len(group)
        for index, item in enumerate(group):
            if index != chosen:
                item.add_marker(pytest.mark.slow)
