"""Engines with LoRA adapters give what merged weights give: with KV tiers, beams, pooling, drafts, and changed files."""

import json
import shutil
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file

from quire import LLM, BeamSearchParams, LoRARequest, RequestError, SamplingParams
from tests.lora_adapter import write_adapter, write_merged
from tests.prefill_thread import PrefillThread

PROMPT = list(range(5, 45))
OTHERS = [list(range(start, start + 40)) for start in (50, 60, 70)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def adapted(tiny_model, tmp_path_factory):
    """Return the folders of two adapters of the tiny model, and of the models into which they are merged."""
    folder = tmp_path_factory.mktemp("adapters")
    tensors = load_file(tiny_model / "model.safetensors")
    names = [name for name in tensors if name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight"))]
    shapes = {name.removesuffix(".weight"): tuple(tensors[name].shape) for name in names}
    deltas = [write_adapter(folder / name, shapes, seed=seed) for name, seed in (("one", 1), ("two", 2))]
    merged = [write_merged(tiny_model, folder / f"merged-{number}", delta) for number, delta in enumerate(deltas)]
    return (folder / "one", folder / "two"), merged


def make_llm(model, **options):
    return closing(LLM(str(model), **{"num_kv_blocks": 60, "block_size": 4, "max_num_seqs": 4, "device": "cpu", **options}))


def tokens(llm, prompts, lora=None):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False, lora_request=lora)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [list(output.outputs[0].token_ids) for output in outputs]


def requests(adapted):
    return [LoRARequest(f"lora-{number}", number + 1, str(path)) for number, path in enumerate(adapted[0])]


def wanted(tiny_model, adapted, prompt=PROMPT):
    """Return the tokens of the base model and of both merged models."""
    found = []
    for model in (tiny_model, *adapted[1]):
        with make_llm(model) as llm:
            found += tokens(llm, [prompt])
    assert len({tuple(one) for one in found}) == 3
    return found


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_kv_tiers_keep_adapters_apart(tiny_model, adapted, tmp_path, tier):
    want = wanted(tiny_model, adapted)
    options = {"kv_host_bytes": 16 << 20} if tier == "host" else {"kv_disk_dir": str(tmp_path), "kv_disk_bytes": 64 << 20}
    options |= {"kv_save": "all", "enable_lora": True, "num_kv_blocks": 15}
    loras = [None, *requests(adapted)]
    with make_llm(tiny_model, **options) as llm:
        for _ in range(2):
            assert [tokens(llm, [PROMPT], lora)[0] for lora in loras] == want
            tokens(llm, OTHERS)  # they leave no block of the others in the pool
        assert llm.llm_engine.scheduler.kv.host_tier.stats.num_loaded > 0
    if tier == "disk":
        with make_llm(tiny_model, **options) as llm:
            assert [tokens(llm, [PROMPT], lora)[0] for lora in reversed(loras)] == want[::-1]
            assert llm.llm_engine.scheduler.kv.host_tier.stats.num_loaded > 0


def test_decode_engines_compute_the_prompts_of_adapters_themselves(tiny_model, adapted, tmp_path):
    """Prefill engines have no adapters: what they computed would be the base model's."""
    want = wanted(tiny_model, adapted)
    address = f"unix:{tmp_path}/pages"
    sizes = {"num_kv_blocks": 60, "block_size": 4, "max_num_seqs": 4, "device": "cpu"}
    roles = {"role": "decode", "prefill_urls": (address,), "prefill_min_tokens": 8, "kv_host_bytes": 16 << 20}
    with (
        PrefillThread(model=str(tiny_model), prefill_listen=address, enable_lora=True, **sizes),
        make_llm(tiny_model, enable_lora=True, **roles) as llm,
    ):
        assert [tokens(llm, [PROMPT], lora)[0] for lora in (*requests(adapted), None)] == [*want[1:], want[0]]
        outcomes = llm.llm_engine.stats.tiers[-1].outcomes
    assert outcomes["adapter"] == 2
    assert outcomes["complete"] == 1


def test_changed_files_under_the_same_name_do_not_find_the_old_kv(tiny_model, adapted, tmp_path):
    want = wanted(tiny_model, adapted)
    shutil.copytree(adapted[0][0], tmp_path / "changing")
    lora = LoRARequest("changing", 1, str(tmp_path / "changing"))
    with make_llm(tiny_model, enable_lora=True) as llm:
        assert tokens(llm, [PROMPT], lora) == [want[1]]
        shutil.copy(adapted[0][1] / "adapter_model.safetensors", tmp_path / "changing")
        assert llm.llm_engine.remove_lora(1)
        assert tokens(llm, [PROMPT], lora) == [want[2]]
        assert tokens(llm, [PROMPT]) == [want[0]]


def test_beams_are_those_of_the_merged_model(tiny_model, adapted):
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT}]
    found = []
    for model, loras in ((tiny_model, [requests(adapted)[0], None]), (adapted[1][0], None), (tiny_model, None)):
        with make_llm(model, enable_lora=loras is not None) as llm:
            outputs = llm.beam_search(prompts, params, loras)
            found.append([[list(one.tokens) for one in output.sequences] for output in outputs])
    assert found[0] == [found[1][0], found[2][0]]
    assert found[1] != found[2]


def test_embeddings_are_those_of_the_merged_model(tiny_model, adapted):
    lora = requests(adapted)[1]
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": OTHERS[0]}]
    found = []
    for model, loras in ((tiny_model, lora), (adapted[1][1], None), (tiny_model, None)):
        with make_llm(model, enable_lora=loras is not None) as llm:
            found.append(torch.tensor([o.outputs.embedding for o in llm.embed(prompts, use_tqdm=False, lora_request=loras)]))
            data = llm.encode(prompts, use_tqdm=False, lora_request=loras)
            assert torch.equal(torch.tensor([o.outputs.data for o in data]), found[-1])
    assert torch.allclose(found[0], found[1], atol=1e-4)
    assert not torch.allclose(found[1], found[2], atol=1e-2)


def write_pooling(folder):
    """Add the files of sentence-transformers, which make a model one of embeddings."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"} for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))


def test_scores_are_those_of_the_merged_model(tiny_model, adapted, tmp_path):
    """Of an embedding model, a score is the cosine of two embeddings."""
    lora, found = requests(adapted)[0], []
    for name, model, loras in (("base", tiny_model, lora), ("merged", adapted[1][0], None), ("plain", tiny_model, None)):
        shutil.copytree(model, tmp_path / name)
        write_pooling(tmp_path / name)
        with make_llm(tmp_path / name, enable_lora=loras is not None) as llm:
            (output,) = llm.score("the fox", "a dog", use_tqdm=False, lora_request=loras)
            found.append(output.outputs.score)
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert found[1] != pytest.approx(found[2], abs=1e-3)


def test_an_engine_without_adapters_refuses_them(tiny_model, adapted):
    with make_llm(tiny_model) as llm, pytest.raises(RequestError, match="start it with enable_lora=True") as caught:
        tokens(llm, [PROMPT], requests(adapted)[0])
    assert caught.value.param == "lora_request"
