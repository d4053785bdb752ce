"""Where a model is looked for."""

import huggingface_hub
import pytest

from quire.base.errors import ConfigError
from quire.model.resolve import BUNDLED_MODELS, resolve_model


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Replace the download by one that puts `files` that fit the patterns into a folder; records its calls."""
    calls = []

    class Hub:
        files = ("config.json", "model.safetensors", "pytorch_model.bin")

        @staticmethod
        def download(model, *, revision, allow_patterns, ignore_patterns):
            calls.append((model, revision, allow_patterns))
            for name in huggingface_hub.utils.filter_repo_objects(
                Hub.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            ):
                (tmp_path / name).parent.mkdir(exist_ok=True)
                (tmp_path / name).write_text("")
            return str(tmp_path)

        @staticmethod
        def listing(model, *, revision):
            assert not calls or calls[-1][:2] == (model, revision)
            return list(Hub.files)

    Hub.calls = calls
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub.download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", Hub.listing)
    return Hub


def test_local_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "some").mkdir()
    assert resolve_model(str(tmp_path / "some")) == tmp_path / "some"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("some").resolve() == tmp_path / "some"


def test_bundled_names_come_first(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.model.resolve.BUNDLED_FOLDER", tmp_path / "demo_models")
    for name in BUNDLED_MODELS:
        with pytest.raises(ConfigError, match="not part of this installation"):
            resolve_model(name)
        (tmp_path / "demo_models" / name).mkdir(parents=True)
        assert resolve_model(name) == tmp_path / "demo_models" / name


def test_hub_id_downloads_safetensors_and_no_pickles(hub, tmp_path):
    assert resolve_model("org/name", "v1") == tmp_path
    assert [call[:2] for call in hub.calls] == [("org/name", "v1")]
    assert not (tmp_path / "pytorch_model.bin").exists()


def test_hub_id_without_safetensors_downloads_pickles(hub, tmp_path):
    hub.files = ("config.json", "pytorch_model.bin", "tokenizer.model", "merges.txt", "chat_template.jinja")
    hub.files += ("onnx/model.json", "original/consolidated.00.pth", "training_args.bin", "README.md")
    resolve_model("org/name")
    assert {path.name for path in tmp_path.iterdir()} == set(hub.files[:5])


@pytest.mark.parametrize("model", ["org/no-such-model-of-quire", "not a model: at all", "a/b/c/d"])
def test_what_is_nowhere_is_a_clear_error(monkeypatch, tmp_path, model):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"not a folder, not a bundled model .* not found on, or no access to"):
        resolve_model(model)


def test_paths_are_not_looked_for_on_the_hub(hub, tmp_path):
    (tmp_path / "model.pth").write_text("")
    with pytest.raises(ConfigError, match="it is a file"):
        resolve_model(str(tmp_path / "model.pth"))
    for path in ("./nowhere", str(tmp_path / "nowhere"), "~/no-such-folder-of-quire"):
        with pytest.raises(ConfigError, match="there is no folder"):
            resolve_model(path)
    assert not hub.calls


def test_revision_of_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="revision"):
        resolve_model(str(tmp_path), "main")


def test_repository_of_one_gguf_file_stands_for_it(hub, tmp_path):
    hub.files = ("README.md", "config.json", "Qwen3-0.6B-Q8_0.gguf", "mmproj-Qwen3.gguf")
    assert resolve_model("org/name-GGUF", "v1") == tmp_path / "Qwen3-0.6B-Q8_0.gguf"
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "Qwen3-0.6B-Q8_0.gguf"}


def test_repository_of_several_gguf_files_lists_them_and_says_what_to_give(hub, tmp_path):
    hub.files = ("README.md", "a-Q4_K_M.gguf", "a-Q8_0.gguf", "big/a-00001-of-00002.gguf", "big/a-00002-of-00002.gguf")
    with pytest.raises(
        ConfigError, match="holds 3 GGUF files; give one .* as in org/name:a-Q4_K_M.gguf: .* big/a-00001"
    ) as caught:
        resolve_model("org/name")
    assert "00002-of-00002" not in str(caught.value)
    assert not list(tmp_path.glob("**/*.gguf"))


@pytest.mark.parametrize(
    ("file", "files"),
    [
        ("a-Q8_0.gguf", ["a-Q8_0.gguf"]),
        ("big/a-00001-of-00002.gguf", ["big/a-00001-of-00002.gguf", "big/a-00002-of-00002.gguf"]),
    ],
)
def test_one_gguf_file_of_a_repository_is_downloaded_with_its_parts(hub, tmp_path, file, files):
    hub.files = ("a-Q8_0.gguf", "b-Q8_0.gguf", "big/a-00001-of-00002.gguf", "big/a-00002-of-00002.gguf", "model.safetensors")
    assert resolve_model(f"org/name:{file}", "v1") == tmp_path / file
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("**/*") if path.is_file()) == files
    assert [call[:2] for call in hub.calls] == [("org/name", "v1")]


@pytest.mark.parametrize("file", ["c.gguf", "../a.gguf", "/tmp/a.gguf"])
def test_gguf_file_that_is_not_in_the_repository_is_a_clear_error(hub, monkeypatch, file):
    hub.files = ("a.gguf",)
    with pytest.raises(ConfigError, match="there is no file 'c.gguf'" if file == "c.gguf" else "no file of a repository"):
        resolve_model(f"org/name:{file}")


def test_repository_that_cannot_be_listed_is_what_the_cache_holds(hub, monkeypatch, tmp_path):
    def fail(model, *, revision):
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", fail)
    hub.files = ("config.json",)
    assert resolve_model("org/name") == tmp_path
    (tmp_path / "a.gguf").write_text("")
    assert resolve_model("org/name") == tmp_path / "a.gguf"
