"""RouterPage: the web page of `quire serve`, with a view of the backends instead of that of the engine."""

from __future__ import annotations

from quire.serving.answers import Ready
from quire.serving.page.static_files import PAGE, StaticFile, read_static_files

FORWARDED = ("/ui/model", "/ui/tokens")
"""What the page asks of the model; a backend that serves it answers, and checks the key."""
_MARK = (b'<html lang="en">', b'<html lang="en" data-site="router">')


class RouterPage:
    """The files of the page; they need no key. is_enabled: without it there are none."""

    def __init__(self, *, is_enabled: bool = True) -> None:
        files = [StaticFile.of(file.name, _for_router(file)) for file in read_static_files()] if is_enabled else []
        self._files = {file.path: file for file in files}

    def answer(self, path: str, if_none_match: str) -> Ready | None:
        """Return a file; None if the path is not one of the page."""
        file = self._files.get(path)
        return None if file is None else file.answer(if_none_match)


def _for_router(file: StaticFile) -> bytes:
    return file.body.replace(*_MARK, 1) if file.name == PAGE else file.body
