"""The files of the page as answers: read once, each with an ETag, so that a browser's revalidation gets a 304."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from quire.serving.answers import Ready

FOLDER = Path(__file__).parent / "static"
PAGE = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Only resources of this server, no inline scripts or styles, and no text is interpreted as markup.
POLICY = "; ".join(
    (
        "default-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file. name: its name in the folder."""

    name: str
    body: bytes
    etag: str

    @classmethod
    def of(cls, name: str, body: bytes) -> StaticFile:
        """Return a file with the ETag of its body."""
        return cls(name, body, f'"{hashlib.sha256(body).hexdigest()[:24]}"')

    @property
    def path(self) -> str:
        """The path on the server."""
        return "/" if self.name == PAGE else f"/ui/{self.name}"

    @property
    def media_type(self) -> str:
        """The media type."""
        return MEDIA_TYPES[Path(self.name).suffix]

    def answer(self, if_none_match: str) -> Ready:
        """Return the file, or 304 if the client has it; if_none_match is that header, "" for none."""
        headers = {**HEADERS, "etag": self.etag}
        tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
        if self.etag in tags or "*" in tags:
            return Ready(None, 304, headers)
        return Ready(self.body, headers=headers, media_type=self.media_type)


def read_static_files(folder: Path = FOLDER) -> tuple[StaticFile, ...]:
    """Return every file of the page."""
    found: list[StaticFile] = []
    for path in sorted(folder.iterdir()):
        if path.suffix in MEDIA_TYPES:
            found.append(StaticFile.of(path.name, path.read_bytes()))
    return tuple(found)
