"""How often a start reads its files."""

import json
from collections import Counter

import numpy as np
import pytest

from quire import LLM, EngineConfig
from quire.base import gguf_file
from quire.base.gguf_file import read_gguf
from quire.base.shared_reads import shared_reads
from quire.model import config_reader
from quire.worker.inspect import inspect_model
from tests.gguf_writer import write_gguf
from tests.tiny_checkpoint import write_checkpoint

HIDDEN_SIZE, INNER = 32, 64
BYTES = [*"abcdefghijklmnopqrstuvwxyz", "<end>"]
METADATA = {
    "general.architecture": ("string", "qwen2"),
    "qwen2.block_count": ("u32", 1),
    "qwen2.embedding_length": ("u32", HIDDEN_SIZE),
    "qwen2.feed_forward_length": ("u32", INNER),
    "qwen2.context_length": ("u32", 64),
    "qwen2.attention.head_count": ("u32", 4),
    "qwen2.attention.layer_norm_rms_epsilon": ("f32", 1e-5),
    "tokenizer.ggml.model": ("string", "gpt2"),
    "tokenizer.ggml.pre": ("string", "qwen2"),
    "tokenizer.ggml.tokens": ("string[]", BYTES),
    "tokenizer.ggml.token_type": ("i32[]", [1] * 26 + [3]),
    "tokenizer.ggml.merges": ("string[]", []),
    "tokenizer.ggml.eos_token_id": ("u32", 26),
    "general.sampling.temp": ("f32", 0.5),
}
SHAPES = {
    "token_embd.weight": (len(BYTES), HIDDEN_SIZE),
    "output_norm.weight": (HIDDEN_SIZE,),
    **{f"blk.0.{name}_norm.weight": (HIDDEN_SIZE,) for name in ("attn", "ffn")},
    **{f"blk.0.attn_{name}.weight": (HIDDEN_SIZE, HIDDEN_SIZE) for name in ("q", "k", "v", "output")},
    **{f"blk.0.attn_{name}.bias": (HIDDEN_SIZE,) for name in ("q", "k", "v")},
    **{f"blk.0.ffn_{name}.weight": (INNER, HIDDEN_SIZE) for name in ("gate", "up")},
    "blk.0.ffn_down.weight": (HIDDEN_SIZE, INNER),
}


def write(tmp_path):
    generator = np.random.default_rng(0)
    tensors = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    return write_gguf(tmp_path / "model.gguf", METADATA, tensors)


@pytest.fixture
def headers(monkeypatch):
    """The files whose GGUF header was read."""
    read, paths = gguf_file.read_gguf_file, []

    def record(path):
        paths.append(path)
        return read(path)

    monkeypatch.setattr(gguf_file, "read_gguf_file", record)
    return paths


def test_header_is_read_once_when_an_engine_starts_from_a_gguf_file(tmp_path, headers):
    path = write(tmp_path)
    llm = LLM(str(path), num_kv_blocks=8)
    assert llm.llm_engine.default_sampling_params().temperature == 0.5
    assert llm.llm_engine.tokenizer.encode("ab") == [0, 1]
    llm.close()
    assert headers == [path]


def test_header_is_read_again_when_the_file_may_have_changed(tmp_path, headers):
    path = write(tmp_path)
    for _ in range(2):
        inspect_model(EngineConfig(model=str(path)))
        read_gguf(path)
    assert headers == [path] * 4
    with shared_reads():
        assert read_gguf(path) is read_gguf(path)
        with shared_reads():
            assert read_gguf(path) is read_gguf(path)
        read_gguf(path)
    assert headers == [path] * 5


def test_each_json_file_is_read_once_when_an_engine_starts_from_a_folder(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "model", "qwen3")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "eos_token_id": [7]}))
    read, seen = config_reader.load_json_object, Counter()

    def count(file):
        seen[file.name] += 1
        return read(file)

    monkeypatch.setattr(config_reader, "load_json_object", count)
    llm = LLM(str(folder), num_kv_blocks=8)
    assert llm.llm_engine.default_sampling_params().temperature == 0.25
    assert 7 in llm.llm_engine.report.spec.eos_token_ids
    llm.close()
    assert seen == {"config.json": 1, "generation_config.json": 1}


def test_failed_read_is_tried_again(tmp_path):
    path = tmp_path / "model.gguf"
    with shared_reads():
        with pytest.raises(gguf_file.ModelFormatError):
            read_gguf(path)
        write(tmp_path)
        assert read_gguf(path).path == path
