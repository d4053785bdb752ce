"""Which combinations of a kind of draft, a model and a cache there are, and which of them are slow; those run with -m slow.

Each kind runs on each model in one cache, and on three models in a row in all caches. By default each kind of head and of
several together, and of proposer where something happens to the sequences, runs on one model; the other kinds run on three.
What happens to the sequences takes turns: each kind meets each of these events on three models, each with another cache.
"""

import zlib

import pytest

HEADS = ("eagle", "mtp", "medusa", "lookahead merged", "suffix tree", "six")
RUN_ALWAYS = ("eagle3", "medusa", "medusa tree")
FAMILIES = ("qwen3", "mistral", "gemma2", "qwen3_moe", "gpt_oss")
CACHES = ("bf16", "f32", "int8")


def is_on_diagonal(kind, params, turn=0):
    """Whether a kind runs on this model in this cache: each model has one, and three models in a row have all of them."""
    places = FAMILIES.index(params["tiny_family"]) + CACHES.index(params["cache"])
    return (places + zlib.crc32(kind.encode()) + turn) % len(CACHES) == 0


def is_in_turn(kind, params, turn=0):
    """Whether a model is among three in a row: which ones changes with the kind. MTP heads exist for two models only."""
    return (
        kind.startswith("mtp") or 0 <= FAMILIES.index(params["tiny_family"]) - (zlib.crc32(kind.encode()) // 3 + turn) % 3 < 3
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    groups, left_out = {}, set()
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if not {"tiny_family", "cache", "kind"} <= params.keys():
            continue
        kind, options = str(params["kind"]), params.get("options")
        is_head = kind.startswith(HEADS) and kind not in RUN_ALWAYS
        is_skipped = kind.startswith("mtp") and params["tiny_family"] not in ("qwen3", "mistral")
        turn = 0 if options is None else zlib.crc32(repr(options).encode())
        if is_skipped or not is_on_diagonal(kind, params, turn) or (options is not None and not is_in_turn(kind, params, turn)):
            left_out.add(item)
        elif is_head or options is not None:
            groups.setdefault((item.originalname, kind, str(options)), []).append(item)
        elif not is_in_turn(kind, params):
            item.add_marker(pytest.mark.slow)
    for key, group in groups.items():
        quick = [item for item in group if not item.get_closest_marker("slow")]
        for item in group:
            if item is not quick[zlib.crc32(repr(key).encode()) % len(quick)]:
                item.add_marker(pytest.mark.slow)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))
