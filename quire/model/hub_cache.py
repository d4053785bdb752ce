"""The models in the cache of the Hugging Face hub: what is there, and what is removed. No torch."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from quire.base.errors import ConfigError
from quire.base.suggestions import did_you_mean

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo

_REPOSITORY = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?")
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.\w+")
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")
_MIN_COMMIT_CHARACTERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A repository in the cache.

    num_bytes       of all its files, and of what an interrupted download has left
    revisions       branches and tags with the commits they stand for, then commits without a name
    last_used_s     seconds since the epoch
    is_complete     False where weights are missing, as after an interrupted download
    """

    name: str
    num_bytes: int
    revisions: tuple[str, ...]
    last_used_s: float
    is_complete: bool


def cached_models() -> list[CachedModel]:
    """Return the models in the cache, by name."""
    found = [_describe(repository) for repository in _repositories(_scan())]
    known = {model.name for model in found}
    found += [
        CachedModel(name=name, num_bytes=_size_of(folder), revisions=(), last_used_s=folder.stat().st_mtime, is_complete=False)
        for name, folder in _folders().items()
        if name not in known
    ]
    return sorted(found, key=lambda model: model.name.lower())


def remove_cached(name: str, revision: str | None = None) -> int:
    """Remove a model from the cache, or one revision of it; return how many bytes that frees.

    revision  a branch, a tag, or the beginning of a commit
    Raises ConfigError where it is not there.
    """
    cache = _scan()
    repository = next((one for one in _repositories(cache) if one.repo_id == name), None)
    folder = _folders().get(name)
    if repository is None and folder is None:
        raise _not_cached(name)
    if revision is None:
        assert folder is not None or repository is not None
        where = folder if folder is not None else Path(repository.repo_path)  # type: ignore[union-attr]
        num_bytes = _size_of(where)
        shutil.rmtree(where)
        return num_bytes
    commits = set() if repository is None else _commits_of(repository, revision)
    if cache is None or len(commits) != 1:
        known = () if repository is None else _revisions_of(repository)
        problem = "is not in the cache" if not commits else "stands for several commits"
        raise ConfigError(f"revision {revision!r} of {name} {problem}; there are {', '.join(known) or 'none'}")
    strategy = cache.delete_revisions(*commits)
    strategy.execute()
    return strategy.expected_freed_size


def _scan() -> HFCacheInfo | None:
    """Return what the hub's library finds, None where there is no cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(_cache_folder())
    except CacheNotFound:
        return None


def _cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _repositories(cache: HFCacheInfo | None) -> Iterable[CachedRepoInfo]:
    return () if cache is None else [one for one in cache.repos if one.repo_type == "model"]


def _folders() -> dict[str, Path]:
    """Return the folders of models in the cache by their names, also of those without one complete file."""
    cache = _cache_folder()
    found = sorted(cache.glob("models--*")) if cache.is_dir() else []
    return {folder.name.removeprefix("models--").replace("--", "/", 1): folder for folder in found if folder.is_dir()}


def _describe(repository: CachedRepoInfo) -> CachedModel:
    folder = Path(repository.repo_path)
    return CachedModel(
        name=repository.repo_id,
        num_bytes=_size_of(folder),
        revisions=_revisions_of(repository),
        last_used_s=repository.last_accessed,
        is_complete=bool(repository.revisions) and all(_has_weights(Path(one.snapshot_path)) for one in repository.revisions),
    )


def _has_weights(snapshot: Path) -> bool:
    """Return whether a snapshot has weights: all that its index names, and all parts of what is split."""
    for index in snapshot.glob("*.index.json"):
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            if not all((snapshot / name).is_file() for name in named):
                return False
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return False
    files = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.suffix in _WEIGHTS]
    shards = Counter((match[1], int(match[3])) for match in map(_SHARD.fullmatch, files) if match is not None)
    return bool(files) and all(count >= number for (_, number), count in shards.items())


def _revisions_of(repository: CachedRepoInfo) -> tuple[str, ...]:
    named = [f"{ref} ({one.commit_hash[:8]})" for one in repository.revisions for ref in sorted(one.refs)]
    return (*sorted(named), *sorted(one.commit_hash[:8] for one in repository.revisions if not one.refs))


def _commits_of(repository: CachedRepoInfo, revision: str) -> set[str]:
    named = {one.commit_hash for one in repository.revisions if revision in one.refs}
    if named or len(revision) < _MIN_COMMIT_CHARACTERS:
        return named
    return {one.commit_hash for one in repository.revisions if one.commit_hash.startswith(revision.lower())}


def _size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder, of links only the link."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _not_cached(name: str) -> ConfigError:
    hint = ""
    if ":" in name:
        hint = f"; whole repositories are removed: give {name.partition(':')[0]}"
    elif not _REPOSITORY.fullmatch(name):
        hint = "; give the name of a repository, such as owner/name"
    close = get_close_matches(name, _folders(), 1)
    return ConfigError(f"{name!r} is not in the cache of the Hugging Face hub{did_you_mean(close)}{hint}")
