"""Old private names do not come back: the code uses the terms of the field."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLD = re.compile(
    r"\b(Nursery|Prober|can_go_on|thin_schema|thinned_schema|without_phrases|FittedGrammar|JsonEndings|TextBefore|written_values"
    r"|argument_styles|Pace|pooled_pace|atonement|naps|doze|sleep_through|nap_left|tap_layers|walk_drawn|take_walks"
    r"|next_token_law|StepDraft|giving_way|num_draft_wish|draft_wishes|Patience|ConstrainedRows|DeviceStepper|choosing_kernels"
    r"|DeviceStep|AttentionInput|Preparation|may_hurry|line_places|_obey|PoliteTransport|shown_error|divert|DirectBypass|Outlet"
    r"|_taker|is_screened|_screen_bytes|narrow weight|five launches|_tell|_tell_\w+|tells_prompt_ids"
    r"|narrow|narrowed|narrower|narrow_\w+|is_narrow|fill_lines_of_decode|[Rr]ecorded steps?)\b"
)


def test_code_has_no_old_names():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in ("quire", "docs")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".h", ".cpp", ".inl", ".md")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if OLD.search(line)
    ]
    assert found == []
