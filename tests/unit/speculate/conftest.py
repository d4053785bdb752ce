"""Which combinations are slow; all of them run with -m slow.

Each kind of head, and of proposer where things happen to the sequences, runs on one model and cache.
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
        kind, options = str(params["kind"]), params.get("options")
        is_head = kind.startswith(HEADS) and kind not in RUN_ALWAYS
        is_skipped = kind.startswith("mtp") and params["tiny_family"] not in ("qwen3", "mistral")
        if (is_head or options is not None) and not is_skipped:
            groups.setdefault((item.originalname, kind, str(options)), []).append(item)
    for key, group in groups.items():
        chosen = zlib.crc32(repr(key).encode()) % len(group)
        for index, item in enumerate(group):
            if index != chosen:
                item.add_marker(pytest.mark.slow)
