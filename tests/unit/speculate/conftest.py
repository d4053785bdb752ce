"""Which combinations are slow; all of them run with -m slow.

Each kind of head runs on one model and cache, and what may happen to the sequences on one cache of each model.
"""

import zlib

import pytest

HEADS = ("eagle", "mtp", "medusa")
RUN_ALWAYS = ("eagle3", "medusa", "medusa tree")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    groups = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if not {"tiny_family", "cache", "kind"} <= params.keys():
            continue
        family, kind, options = params["tiny_family"], str(params["kind"]), str(params.get("options"))
        if kind.startswith(HEADS) and kind not in RUN_ALWAYS:
            if not kind.startswith("mtp") or family in ("qwen3", "mistral"):
                groups.setdefault((item.originalname, kind, options), []).append(item)
        elif "options" in params:
            groups.setdefault((item.originalname, family, kind, options), []).append(item)
    for key, group in groups.items():
        chosen = zlib.crc32(repr(key).encode()) % len(group)
        for index, item in enumerate(group):
            if index != chosen:
                item.add_marker(pytest.mark.slow)
