"""The bar of long measurements."""

import sys

from quire.bench.progress import progress_bar


def count_to_two(is_shown):
    with progress_bar(2, "run", is_shown) as bar:
        bar.set_description("first")
        bar.update(2)


def test_bar_is_shown_on_a_terminal_alone_and_where_it_is_wanted(capsys, monkeypatch):
    count_to_two(True)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    count_to_two(False)
    assert capsys.readouterr() == ("", "")
    count_to_two(True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "first" in err
