"""Find the folder of a model, or its GGUF file: bundled, local, or on the Hugging Face hub and in its cache. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from glob import escape
from pathlib import Path, PurePosixPath

from quire.base.bundled import BUNDLED_FOLDER
from quire.base.errors import ConfigError
from quire.base.gguf_file import is_gguf, shard_number
from quire.base.logging import get_logger
from quire.base.suggestions import did_you_mean

logger = get_logger(__name__)

BUNDLED_MODELS = ("demo", "demo-draft", "demo-moe")
BUNDLED_HEADS = ("demo-eagle3", "demo-medusa", "demo-mtp")
"""Draft heads for `demo`."""

MEDUSA_FILE = "medusa_lm_head.pt"
"""The files of a repository with only Medusa heads."""

_CONFIGURATION_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "tokenizer*"]
_MODULE_FILES = ["[0-9]*_*/*.json", "[0-9]*_*/*.safetensors", "[0-9]*_*/*.bin"]
_MAX_LISTED = 20
_NOT_NEEDED = ["*/*", "consolidated*", "training_args*", "optimizer*", "*.gguf"]


def resolve_model(model: str, revision: str | None = None, token: str | None = None) -> Path:
    """Return the folder of a model, or its GGUF file; downloads it where it is a hub id that is not in the local cache.

    model     one of BUNDLED_MODELS or BUNDLED_HEADS, otherwise an existing folder or .gguf file, otherwise a hub id, or one
              with a file ("owner/name:FILE.gguf"); a folder or repository with one .gguf file and no other weights stands for
              the file
    revision  branch, tag or commit, for a hub id only
    token     of the hub; None: that of the environment, or the one that is stored
    Raises ConfigError.
    """
    folder = _bundled_folder(model) or _local_folder(model)
    if folder is None:
        return _download(model, _Source(revision, token))
    if revision is not None:
        raise ConfigError(f"revision {revision!r} is for models on the hub, but {model!r} is {folder}; leave it out")
    return folder


def is_on_this_machine(model: str) -> bool:
    """Whether a model is bundled, or a folder or file. Raises ConfigError as `resolve_model` does."""
    return (_bundled_folder(model) or _local_folder(model)) is not None


@dataclass(frozen=True, slots=True)
class _Source:
    """Which revision of a repository is downloaded, and with which token."""

    revision: str | None
    token: str | None

    def options(self) -> dict[str, str | None]:
        """Return the arguments of the hub's functions."""
        return {"revision": self.revision, **({} if self.token is None else {"token": self.token})}


def _bundled_folder(model: str) -> Path | None:
    if model not in (*BUNDLED_MODELS, *BUNDLED_HEADS):
        return None
    folder = BUNDLED_FOLDER / model
    if not folder.is_dir():
        raise ConfigError(f"the bundled model {model!r} is not part of this installation: there is no {folder}")
    return folder


def _local_folder(model: str) -> Path | None:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _gguf_inside(folder) or folder
    if is_gguf(folder):
        return folder
    if folder.is_file():
        raise ConfigError(f"{model!r} cannot be loaded, it is a file; give the folder of a Hugging Face checkpoint, or a .gguf")
    if model.startswith(("/", "./", "../", "~")) or model.endswith("/"):
        raise ConfigError(f"there is no folder {model!r}")
    return None


def _gguf_inside(folder: Path) -> Path | None:
    """Return the GGUF file of a folder without other weights (of a split file the first part), None if there is none."""
    suffixes = {path.suffix for path in folder.iterdir()}
    if ".safetensors" in suffixes or (".bin" in suffixes and (folder / "config.json").is_file()):
        return None
    files = sorted(path for path in folder.iterdir() if is_gguf(path) and (shard_number(path) or 1) == 1)
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise ConfigError(f"{str(folder)!r} holds {len(files)} GGUF files; give one of them as the model: {names}")
    return files[0] if files else None


def _download(model: str, source: _Source) -> Path:
    repository, _, file = model.partition(":")
    is_file = file.lower().endswith(".gguf")
    if is_file and not _is_inside(file):
        raise ConfigError(f"{file!r} is no file of a repository; give one as owner/name:FILE.gguf")
    try:
        if is_file:
            return _download_gguf(repository, source, file)
        folder = _download_folder(model, source)
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        hint = did_you_mean(get_close_matches(model, (*BUNDLED_MODELS, *BUNDLED_HEADS), 1))
        raise ConfigError(
            f"{model!r}{hint} is not a folder, not a bundled model ({', '.join(BUNDLED_MODELS)}; heads: "
            f"{', '.join(BUNDLED_HEADS)}), and not found on, or no access to, the Hugging Face hub: {reason}"
        ) from error
    names = [] if _has_weights(folder) else _gguf_on_the_hub(model, source)
    if len(names) > 1:
        raise ConfigError(
            f"{model!r} holds {len(names)} GGUF files; give one of them as the model, as in {model}:{names[0]}: "
            + ", ".join(names[:_MAX_LISTED])
            + (f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else "")
        )
    if names:
        return _download_gguf(model, source, names[0])
    return (folder.is_dir() and _gguf_inside(folder)) or folder


def _download_folder(model: str, source: _Source) -> Path:
    """Return the folder of a repository, with its safetensors; where it has none, with pickled weights, or a Medusa head."""
    from huggingface_hub import snapshot_download

    def fetch(weights: str) -> Path:
        patterns = [*_CONFIGURATION_FILES, weights]
        return Path(snapshot_download(model, **source.options(), allow_patterns=patterns, ignore_patterns=_NOT_NEEDED))

    folder = fetch("*.safetensors")
    if (folder / "modules.json").is_file():  # of sentence-transformers: 1_Pooling and so on
        snapshot_download(model, **source.options(), allow_patterns=_MODULE_FILES)
    if any(folder.glob("*.safetensors")):
        return folder
    folder = fetch("*.bin")
    return folder if any(folder.glob("*.bin")) else fetch(MEDUSA_FILE)


def _has_weights(folder: Path) -> bool:
    return any(path.suffix in (".safetensors", ".bin", ".pt") for path in folder.glob("*"))


def _gguf_on_the_hub(model: str, source: _Source) -> list[str]:
    """Return the GGUF files of a repository that are models, of split ones the first part; none where the hub does not say."""
    from huggingface_hub import list_repo_files

    try:
        names = sorted(list_repo_files(model, **source.options()))
    except Exception as error:  # noqa: BLE001 - the repository may be in the cache alone
        logger.info("the files of %s cannot be listed: %s", model, " ".join(str(error).split())[:200])
        return []
    paths = [Path(name) for name in names if name.lower().endswith(".gguf") and _is_inside(name)]
    return [path.as_posix() for path in paths if (shard_number(path) or 1) == 1 and not path.name.startswith("mmproj")]


def _download_gguf(repository: str, source: _Source, file: str) -> Path:
    """Return a GGUF file of a repository, downloaded with what it is split into."""
    from huggingface_hub import snapshot_download

    pattern = escape(file)
    if shard_number(Path(file)) is not None:
        pattern = pattern.replace("-00001-of-", "-*-of-")
    folder = Path(snapshot_download(repository, **source.options(), allow_patterns=[pattern], ignore_patterns=None))
    if not is_gguf(folder / file):
        raise ConfigError(f"there is no file {file!r} in it")
    return folder / file


def _is_inside(name: str) -> bool:
    """Return whether a file name stays inside its folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name
