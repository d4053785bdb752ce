"""What libraries are told about a step: stand-ins note their calls, and compute with the reference what these ask for."""

import dataclasses
import itertools
import sys
import types

import pytest
import torch

from quire.base.errors import ConfigError, InvariantError
from quire.contracts.model_spec import AttentionSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.reference.attention import attend as attend_by_reference
from quire.kernels.triton.attention import KvCache, attend
from quire.kernels.triton.libraries import load_library
from quire.kernels.triton.step import DeviceAttentionMetadata
from tests.unit.kernels.gpu.paged_cases import make_case

BF16 = torch.bfloat16


def reference(q, k, v, starts, lengths, tables, heads, scale, window, softcap):
    spec = AttentionSpec(*heads, q.shape[2], scale, window=window, softcap=softcap)
    step = AttentionMetadata(torch.zeros(len(q)), starts, lengths, tables.long().cpu(), None)
    on_cpu = [part.float().cpu() for part in (q, k, v)]
    return attend_by_reference(*on_cpu, step, spec).to(q.dtype).to(q.device)


class FakeWrapper:
    """BatchPrefillWithPagedKVCacheWrapper by its documentation."""

    num_plans = 0

    def __init__(self, workspace, kv_layout):
        assert workspace.dtype == torch.uint8
        assert kv_layout == "HND"

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, **options):
        FakeWrapper.num_plans += 1
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert tensor.dtype == torch.int32
        assert all(tensor.device.type == "cpu" for tensor in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len))
        assert options["causal"]
        assert options["q_data_type"] == options["kv_data_type"] == BF16
        starts = paged_kv_indptr.tolist()
        self.pages = [paged_kv_indices[first:last] for first, last in itertools.pairwise(starts)]
        last_lens = paged_kv_last_page_len.tolist()
        size = options["page_size"]
        self.lengths = [(len(pages) - 1) * size + last for pages, last in zip(self.pages, last_lens, strict=True)]
        self.starts, self.options = qo_indptr.tolist(), options

    def run(self, q, paged_kv_cache):
        options = self.options
        assert paged_kv_cache[0].shape[1:] == (options["num_kv_heads"], options["page_size"], options["head_dim_qk"])
        tables = torch.nn.utils.rnn.pad_sequence(self.pages, batch_first=True)
        heads = options["num_qo_heads"], options["num_kv_heads"]
        window = None if options["window_left"] < 0 else options["window_left"] + 1
        cap = options["logits_soft_cap"]
        return reference(q, *paged_kv_cache, self.starts, self.lengths, tables, heads, options["sm_scale"], window, cap)


def flash(q, k, v, starts, lengths, tables, softmax_scale, causal, window_size, softcap):
    """What both versions of FlashAttention compute; caches are [num_blocks, block_size, K, D] there."""
    assert causal
    assert tables.dtype == starts.dtype == torch.int32
    window = None if window_size == (-1, -1) else window_size[0] + 1
    heads = q.shape[1], k.shape[2]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    return reference(q, k, v, starts.tolist(), lengths, tables, heads, softmax_scale, window, softcap or None)


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, **options):
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    return flash(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens.tolist(), page_table, **options)


def flash_attn_varlen_func(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, **options
):  # fmt: skip
    lengths = cu_seqlens_k.diff()
    assert (max_seqlen_q, max_seqlen_k) == (cu_seqlens_q.diff().max(), lengths.max())
    return flash(q, k, v, cu_seqlens_q, lengths.tolist(), block_table, **options)


MODULES = {
    "flashinfer": ("flashinfer", {"BatchPrefillWithPagedKVCacheWrapper": FakeWrapper}),
    "flash_attn 3": ("flash_attn_interface", {"flash_attn_with_kvcache": flash_attn_with_kvcache}),
    "flash_attn 2": ("flash_attn", {"flash_attn_varlen_func": flash_attn_varlen_func}),
}


@pytest.fixture
def install(monkeypatch):
    """Install stand-ins by name, and nothing else."""

    def choose(*names):
        for module_name, contents in MODULES.values():
            is_there = any(MODULES[name][0] == module_name for name in names)
            module = types.SimpleNamespace(**contents) if is_there else None
            monkeypatch.setitem(sys.modules, module_name, module)

    choose()
    return choose


def load(name, *specs, dtype=BF16, kv_dtype=BF16, block_size=256):
    return load_library(name, specs, dtype, kv_dtype, block_size)


@pytest.mark.covering
@pytest.mark.parametrize("options", [{}, {"window": 21, "softcap": 3.0}], ids=["plain", "window-softcap"])
@pytest.mark.parametrize("name, block_size", [("flashinfer", 16), ("flash_attn 3", 16), ("flash_attn 2", 256)])
def test_libraries_attend_what_our_kernels_would(name, block_size, options, install, device):
    install(name)
    spec = AttentionSpec(4, 2, 64, 0.1, **options)
    case = make_case([90, 1, 33, 64], [40, 1, 3, 64], spec, block_size, BF16)
    cache = KvCache(case.k_cache.nan_to_num().to(device), case.v_cache.nan_to_num().to(device))
    q, step = case.q.to(device), DeviceAttentionMetadata.of(case.step, device)
    library = load(name.partition(" ")[0], spec, block_size=block_size)
    found = attend(q, cache, dataclasses.replace(step, library=library), spec)
    torch.testing.assert_close(found, attend(q, cache, step, spec), atol=2e-2, rtol=2e-2)


def test_flashinfer_plans_once_a_step_and_kind_of_layer(install, device):
    install("flashinfer")
    specs = [AttentionSpec(4, 2, 64, 0.1), AttentionSpec(4, 2, 64, 0.1, window=5)]
    library = load("flashinfer", *specs)
    case = make_case([40, 20], [10, 20], specs[0], 16, BF16)
    FakeWrapper.num_plans = 0
    cache = KvCache(case.k_cache.nan_to_num().to(device), case.v_cache.nan_to_num().to(device))
    for _ in range(2):
        step = dataclasses.replace(DeviceAttentionMetadata.of(case.step, device), library=library)
        for spec in specs * 3:
            attend(case.q.to(device), cache, step, spec)
    assert FakeWrapper.num_plans == 4


def test_trees_sinks_and_sums_in_order_stay_with_our_kernels(install, device):
    class Refuses:
        def attend(self, *_):
            raise AssertionError("not for a library")

    spec = AttentionSpec(4, 2, 32, 0.2)
    case = make_case([20], [5], spec, 8, trees=[[-1, 0, 0]])
    cache = KvCache(case.k_cache.to(device), case.v_cache.to(device))
    tree = dataclasses.replace(DeviceAttentionMetadata.of(case.step, device), library=Refuses())
    plain = dataclasses.replace(tree, num_drafts=None, ancestors=None, positions=None)
    q = case.q.to(device)
    assert attend(q, cache, tree, spec).shape == q.shape
    assert attend(q, cache, plain, spec, sinks=torch.zeros(4, device=device)).shape == q.shape
    assert attend(q, cache, plain, spec, is_in_order=True).shape == q.shape
    with pytest.raises(AssertionError, match="not for a library"):
        attend(q, cache, plain, spec)


def test_captured_steps_are_refused_by_libraries_that_plan_on_the_host(install):
    install("flashinfer")
    spec = AttentionSpec(4, 2, 64, 0.1)
    lengths, tables = torch.tensor([3], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    starts = torch.arange(2, dtype=torch.int32)
    step = DeviceAttentionMetadata.of_decode(torch.zeros(1, dtype=torch.int64), starts, lengths, tables, 16)
    with pytest.raises(InvariantError, match="on the host"):
        load("flashinfer", spec).attend(torch.zeros(1, 4, 64), *[torch.zeros(1, 2, 16, 64)] * 2, step, spec)


def test_our_kernels_are_the_default_whatever_is_installed(install):
    install(*MODULES)
    assert load("auto") is None
    assert load("triton") is None


@pytest.mark.parametrize(
    "name, installed, options, message",
    [
        ("flashinfer", [], {}, "flashinfer is not installed: pip install flashinfer-python"),
        ("flash_attn", [], {}, "is not installed: pip install flash-attn, or choose 'triton'"),
        ("flashinfer", ["flashinfer"], {"dtype": torch.float32, "kv_dtype": torch.float32}, "choose another dtype"),
        ("flash_attn", ["flash_attn 3"], {"kv_dtype": torch.int8}, "set kv_cache_dtype to 'auto'"),
        ("flashinfer", ["flashinfer"], {"head_dim": 80}, "the model has 80"),
        ("flash_attn", ["flash_attn 3"], {"head_dim": 320}, "the model has 320"),
        ("flash_attn", ["flash_attn 2"], {"block_size": 64}, "set block_size to 256"),
    ],
)
def test_what_a_library_cannot_attend_is_refused_with_what_to_change(name, installed, options, message, install):
    install(*installed)
    options = dict(options)
    spec = AttentionSpec(4, 2, options.pop("head_dim", 64), 0.1)
    with pytest.raises(ConfigError, match=message):
        load(name, spec, **options)
