"""Attention of prompts by the kernel for Hopper: in an emulation of Gluon, and on a GPU that runs it."""

import dataclasses

import pytest
import torch

from quire.contracts.model_spec import AttentionSpec
from quire.kernels.reference.attention import AttentionMetadata
from quire.kernels.triton import hopper_attention, hopper_attention_kernels
from quire.kernels.triton.attention import KvCache, attend
from quire.kernels.triton.hopper_attention import attend_prompts_launch, runs_on
from quire.kernels.triton.launching import collected_launches
from quire.kernels.triton.step import DeviceAttentionMetadata
from quire.kernels.triton.tile_table import TileRule, TileTable, active_table, using
from tests.unit.kernels.gpu import gluon_emulation
from tests.unit.kernels.gpu.gluon_emulation import GluonEmulation
from tests.unit.kernels.gpu.paged_cases import dense_attention, make_case

BF16 = torch.bfloat16
CPU = torch.device("cpu")
GROUPS = [(2, 2), (4, 2), (3, 1), (8, 1)]


def table(**tile):
    """Return the table in use, by which the kernel is chosen."""
    rule = TileRule({}, {"is_specialized": True, "keys": 128, "num_stages": 2, "takes_turns": False, **tile})
    return TileTable("any", "9.0", {"attention-prefill-hopper": (rule,)}).over(active_table())


def spec_of(heads, head_dim, **options):
    return AttentionSpec(*heads, head_dim, head_dim**-0.5, **options)


def launch_of(case, spec, device=CPU):
    """Return the launch and the tensor that it writes, NaN so far."""
    group = spec.num_heads // spec.num_kv_heads
    step = DeviceAttentionMetadata.of(case.step, device)
    tiles = step.tiles(128 // group, max(1, 16 // group))[1]
    q, k, v = (tensor.to(device) for tensor in (case.q, case.k_cache, case.v_cache))
    out = torch.full_like(q, torch.nan)
    return attend_prompts_launch(out, q, k, v, step, tiles, spec), out


def run(case, spec, device, **tile):
    """Return what the kernel writes: on the GPU if it is one for which it is, else in the emulation."""
    with using(table(**tile)):
        launch, out = launch_of(case, spec, device if runs_on(device) else CPU)
    if runs_on(device):
        launch.run()
    else:
        GluonEmulation(hopper_attention_kernels).run(launch)
    return out.cpu()


@pytest.fixture
def on_hopper(monkeypatch):
    """Launches are made as for a GPU."""
    monkeypatch.setattr(hopper_attention, "runs_on", lambda device: True)


@pytest.mark.covering
@pytest.mark.parametrize("heads", GROUPS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tile", [{}, {"keys": 64, "num_stages": 4}, {"takes_turns": True}, {"num_stages": 3}])
@pytest.mark.parametrize("lengths, counts", [([200, 333, 70], [200, 130, 70]), ([128, 129, 385], [128, 127, 258])])
def test_prompts_and_their_later_parts_equal_a_dense_loop(heads, head_dim, tile, lengths, counts, on_hopper, device):
    spec = spec_of(heads, head_dim)
    case = make_case(lengths, counts, spec, 64, BF16)  # with NaN after each context
    torch.testing.assert_close(run(case, spec, device, **tile).double(), dense_attention(case, spec), atol=2e-2, rtol=2e-2)


def test_padding_gives_zeros_and_blocks_may_be_larger(on_hopper, device):
    spec = spec_of((2, 1), 64)
    case = make_case([150], [150], spec, 128, BF16)
    tables = torch.cat((torch.zeros_like(case.step.block_tables), case.step.block_tables))
    step = AttentionMetadata(torch.zeros(170), [0, 20, 170], [0, 150], tables)
    padded = type(case)(step, case.k_cache, case.v_cache, case.k, case.v, torch.cat((case.q[:20], case.q)))
    out = run(padded, spec, device)
    assert out[:20].eq(0).all()
    torch.testing.assert_close(out[20:].double(), dense_attention(case, spec), atol=2e-2, rtol=2e-2)


def test_bits_do_not_change_with_the_neighbours_or_the_cuts_of_a_prompt(on_hopper, device):
    spec = spec_of((4, 2), 64)
    case = make_case([300, 90], [300, 90], spec, 64, BF16)
    together = run(case, spec, device)
    for first, last in ((0, 77), (77, 300)):
        step = AttentionMetadata(torch.zeros(last - first), [0, last - first], [last], case.step.block_tables[:1])
        alone = type(case)(step, case.k_cache, case.v_cache, [], [], case.q[first:last])
        assert torch.equal(run(alone, spec, device), together[first:last])


def test_it_is_used_only_where_the_table_says_so_and_it_computes_such_attention(on_hopper):
    case = make_case([100], [100], spec_of((2, 1), 64), 64, BF16)
    with using(table(is_specialized=False)):
        assert launch_of(case, spec_of((2, 1), 64))[0] is None
    with using(table()):
        assert launch_of(case, spec_of((2, 1), 64))[0] is not None
        for option in ({"window": 32}, {"softcap": 20.0}):
            assert launch_of(case, spec_of((2, 1), 64, **option))[0] is None
        for head_dim, block_size, dtype in ((80, 64, BF16), (64, 16, BF16), (64, 64, torch.float32)):
            spec = spec_of((2, 1), head_dim)
            assert launch_of(make_case([100], [100], spec, block_size, dtype), spec)[0] is None


@pytest.mark.parametrize("name", ["block_tables_ptr", "context_lens_ptr", "out_ptr", "k_desc"])
def test_the_emulation_refuses_what_lies_outside_of_a_tensor(on_hopper, monkeypatch, name):
    monkeypatch.setattr(gluon_emulation, "_WAIT_S", 0.1)  # for what is never copied
    spec = spec_of((2, 1), 64)
    with using(table()):
        launch, _ = launch_of(make_case([100], [100], spec, 64, BF16), spec)
    cut = launch.arguments[name]
    cut = dataclasses.replace(cut, tensor=cut.tensor[:1], shape=(64, 64)) if name == "k_desc" else cut.flatten()[:-1]
    with pytest.raises(IndexError):
        GluonEmulation(hopper_attention_kernels).run(launch._replace(arguments=launch.arguments | {name: cut}))


def test_only_a_gpu_that_it_is_for_runs_it(device):
    spec = spec_of((2, 1), 64)
    case = make_case([100], [100], spec, 64, BF16)
    step = DeviceAttentionMetadata.of(case.step, device)
    with using(table()), collected_launches() as launches:
        attend(case.q.to(device), KvCache(case.k_cache.to(device), case.v_cache.to(device)), step, spec)
    expected = "attend_prompts" if runs_on(device) else "attend_runs"
    assert [launch.kernel.fn.__name__ for launch in launches] == [expected]


def test_steps_most_of_whose_tiles_are_empty_use_the_other_kernel(on_hopper):
    spec = spec_of((2, 1), 64)
    case = make_case([200], [200], spec, 64, BF16)
    step = DeviceAttentionMetadata.of(case.step, CPU)
    tiles = step.tiles(64, 8)[1]
    q, k, v = case.q, case.k_cache, case.v_cache
    for times, is_used in ((1, True), (2, True), (3, False)):
        more = tiles._replace(sequences=tiles.sequences.repeat(times), offsets=tiles.offsets.repeat(times))
        more = more._replace(num_tiles=times * tiles.num_tiles)
        with using(table()):
            launch = attend_prompts_launch(torch.empty_like(q), q, k, v, step, more, spec)
        assert (launch is not None) is is_used
