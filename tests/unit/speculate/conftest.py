"""Which combinations are slow; all of them run with -m slow.

Each kind of head and of some together, and of proposer where things happen to the sequences, runs on one model and cache; the
other kinds on every model and in every cache, but not on each in each.
"""

import zlib

import pytest

HEADS = ("eagle", "mtp", "medusa", "lookahead merged", "suffix tree", "six")
RUN_ALWAYS = ("eagle3", "medusa", "medusa tree")
FAMILIES = ("qwen3", "mistral", "gemma2", "qwen3_moe", "gpt_oss")
CACHES = ("bf16", "f32", "int8")


def is_on_diagonal(kind, params):
    """Whether a kind runs on this model in this cache: each model has one, and three models in a row have all of them."""
    places = FAMILIES.index(params["tiny_family"]) + CACHES.index(params["cache"])
    return (places + zlib.crc32(kind.encode())) % len(CACHES) == 0


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
        elif not is_skipped and not is_on_diagonal(kind, params):
            item.add_marker(pytest.mark.slow)
    for key, group in groups.items():
        chosen = zlib.crc32(repr(key).encode()) % len(group)
        for index, item in enumerate(group):
            if index != chosen:
                item.add_marker(pytest.mark.slow)
