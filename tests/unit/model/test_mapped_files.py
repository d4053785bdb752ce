"""A weight file that becomes shorter after it was opened: an error that names it, where reading on would end the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.base.errors import ModelFormatError
from quire.model.mapped_files import MappedFiles
from quire.model.quantized_writer import write_quantized
from quire.model.stored_tensors import open_tensors
from tests.ranks import open_descriptors
from tests.tiny_checkpoint import write_checkpoint

GOLDEN = Path(__file__).resolve().parents[4] / "shared" / "data" / "quantised"
SIZES = {"hidden_size": 256, "intermediate_size": 512}
"""So large that what is cut off is pages that nobody has read."""
SCRIPT = """
import os, sys
from pathlib import Path
from quire.base.errors import ModelFormatError
from quire.model.build import build_model
from quire.model.checkpoint import open_parameters
from quire.model.config_reader import read_model_spec
path, file = map(Path, sys.argv[1:])
spec = read_model_spec(path)
parameters = open_parameters(path, spec)
os.truncate(file, file.stat().st_size // 3)
try:
    build_model(spec, parameters, 64, 16)
except ModelFormatError as error:
    print(error)
"""


def load_while_it_is_cut(path, file):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), str(file)], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["plain", pytest.param("quantised", marks=pytest.mark.slow), "pickled"])
def test_folder_is_refused_when_its_file_becomes_shorter(tmp_path, kind):
    folder = write_checkpoint(tmp_path / "plain", "qwen3", **SIZES)
    if kind == "quantised":
        folder = write_quantized(folder, tmp_path / "out", "int8").folder
    file = folder / "model.safetensors"
    if kind == "pickled":
        torch.save(load_file(file), folder / "pytorch_model.bin")
        file.unlink()
        file = folder / "pytorch_model.bin"
    assert f"{file} was changed while it was read" in load_while_it_is_cut(folder, file)


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.skipif(not GOLDEN.is_dir(), reason="../shared/data is not there")
@pytest.mark.parametrize("name", [pytest.param("llamas-F16", marks=pytest.mark.slow), "llama-Q4_K"])
def test_gguf_file_is_refused_when_it_becomes_shorter(tmp_path, name):
    path = tmp_path / "model.gguf"
    path.write_bytes((GOLDEN / f"{name}.gguf").read_bytes())
    assert f"{path} was changed while it was read" in load_while_it_is_cut(path, path)


def test_tensors_of_the_file_that_is_whole_may_be_read(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "qwen3")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for name in ("a", "b"):
        (folder / name).mkdir()
        torch.save(tensors, folder / name / "pytorch_model.bin")
    files = MappedFiles()
    a, b = (open_tensors(folder / name, files) for name in ("a", "b"))
    os.truncate(folder / "a" / "pytorch_model.bin", 100)
    files.check(b.values())
    files.check([torch.zeros(3)])
    for tensor in a.values():
        with pytest.raises(ModelFormatError, match="had .* bytes and has 100"):
            files.check([tensor])


def test_descriptors_are_closed_with_what_holds_them(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "qwen3")
    before = open_descriptors()
    files = MappedFiles()
    opened = open_tensors(folder, files)
    assert open_descriptors() - before
    del files, opened
    assert open_descriptors() <= before
