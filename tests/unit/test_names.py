"""Old private names do not come back: the code uses the terms of the field."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = re.compile(
    r"\b(Nursery|nursery|Prober|probe_main|rehearsal|can_go_on|thin_schema|thinned_schema|without_phrases|FittedGrammar|JsonEndings"
    r"|TextBefore|written_values|argument_styles|special_texts|Pace|pooled_pace|atonement|naps|doze|sleep_through|nap_left"
    r"|tap_layers|walk_drawn|take_walks|Walk|walk_of|next_token_law|StepDraft|step_draft|giving_way|result_check|num_draft_wish"
    r"|draft_wishes|Patience|ConstrainedRows|DeviceStepper|choosing_kernels|DeviceStep|AttentionInput|Preparation|may_hurry"
    r"|line_places|_obey|PoliteTransport|shown_error|divert|DirectBypass|Outlet|Taker|_taker|is_screened|_screen_bytes"
    r"|Screening|ScreenRows|ScreenCopy|screen_head|_tell|_tell_\w+|tells_prompt_ids|fill_lines_of_decode|GraphRecorder|unit_rows)\b"
)
PROSE = re.compile(r"\b(narrow|narrowed|narrower|narrow_\w+|is_narrow|narrow weight|five launches|[Rr]ecorded steps?)\b")
OLD_MODULES = {
    "grammar": "nursery probing probe_main rehearsal thinned_schema excluding without_phrases phrases banned fitted endings "
    "text_before written_values argument_styles special_texts",
    "speculate": "pace pooled_pace account replay",
    "sampling": "law",
    "engine/scheduling": "step_draft giving_way ending remaining result_check",
    "worker": "constrained runner",
    "worker/device": "runner choice columns changes ahead",
    "kernels/triton": "ahead choosing_kernels heads moving feedback dependent",
    "base": "guesses mixing collector",
    "api": "elsewhere",
    "serving": "shown_error link gateway generation line_places",
}
FOLDERS = {"quire": (NAMES, PROSE), "docs": (NAMES, PROSE), "tests": (NAMES,), "bench": (NAMES,), "tools": (NAMES,)}


def test_code_has_no_old_names():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder, patterns in FOLDERS.items()
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".h", ".cpp", ".inl", ".md") and path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if any(pattern.search(line) for pattern in patterns)
    ]
    assert found == []


def test_no_module_has_an_old_name():
    old = [f"{folder}/{name}" for folder, names in OLD_MODULES.items() for name in names.split()]
    assert [
        name for name in old if list((ROOT / "quire").glob(f"{name}*/__init__.py")) or (ROOT / f"quire/{name}.py").exists()
    ] == []
