"""No family replaces a tensor that a checkpoint or a GGUF file lacks: each is an error that names it."""

from __future__ import annotations

import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from quire.base.errors import ModelFormatError
from quire.model.checkpoint import open_parameters, tie_missing_head
from quire.model.config_reader import read_model_spec
from tests.gguf_writer import write_gguf
from tests.golden.make_checkpoints import case_params, reference_model
from tests.golden.make_gguf import parts_of

pytestmark = pytest.mark.golden

CASES = (
    *(
        "llama-bias",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3-bias",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3-multimodal",
        "phi3",
        "gpt2",
    ),
    *("olmo2-bias", "gpt-oss", "granite-bias", "mixtral", "qwen3-moe"),
    *("qwen2-moe", "glm4-moe", "phimoe", "deepseek-v3", "granitemoe-shared", "ernie4-5-moe-bias"),
)
GGUF_CASES = ("llama-bias", "qwen2", "qwen3", "phi3", "gpt2", "olmo2", "gpt-oss", "mixtral")
_NOT_READ = re.compile(r".*(vision_tower|multi_modal_projector)\..*")


def opened(folder):
    return open_parameters(folder, read_model_spec(folder))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", case_params(CASES))
def test_missing_tensor_of_a_checkpoint_is_named(checkpoint, tmp_path, case):
    folder = shutil.copytree(checkpoint(case, "v5"), tmp_path / case)
    file = folder / "model.safetensors"
    whole = {name: tensor.clone() for name, tensor in load_file(file).items()}
    needed = [name for name in whole if not _NOT_READ.fullmatch(name)]
    assert len(needed) > 12
    for name in needed:
        file.unlink()
        save_file({other: tensor for other, tensor in whole.items() if other != name}, file)
        short = re.sub(r"^(model\.)?(language_model\.)?(model\.)?(transformer\.)?", "", name)
        with pytest.raises(ModelFormatError, match=re.escape(short)) as caught:
            opened(folder)
        assert str(folder) in str(caught.value)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", GGUF_CASES)
def test_missing_tensor_of_a_gguf_file_is_named(checkpoint, tmp_path, case):
    folder = checkpoint(case, "v4")
    metadata, whole = parts_of(folder, reference_model(folder))
    may_be_tied = metadata["general.architecture"][1] not in ("olmo2", "gpt-oss")
    for name in whole:
        path = write_gguf(tmp_path / "model.gguf", metadata, {k: v for k, v in whole.items() if k != name})
        if name == "output.weight" and may_be_tied:
            assert "lm_head.weight" not in opened(path)
            continue
        with pytest.raises(ModelFormatError) as caught:
            opened(path)
        assert str(path) in str(caught.value)
        if name == "output.weight":
            assert "no output.weight" in str(caught.value)
            assert "lm_head.weight" not in open_parameters(path, tie_missing_head(path, read_model_spec(path)))
