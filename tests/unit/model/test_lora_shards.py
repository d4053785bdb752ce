"""The parts of an adapter on tensor-parallel GPUs give the whole adapter."""

from __future__ import annotations

import pytest
import torch

from quire.model.config_reader import read_model_spec
from quire.model.device_shards import DeviceShard
from quire.model.lora.adapter import adaptable_shapes
from quire.model.lora.device_shards import AdapterShard
from quire.model.lora.experts import LowRankPair
from quire.model.parameters import parameter_shapes
from quire.worker.expert_parallel import linear_placements
from tests.tiny_checkpoint import write_checkpoint

RANK = 3


@pytest.mark.parametrize("shares", [(1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize(("is_in_order", "has_expert_ranks"), [(True, False), (False, False), (True, True)])
def test_parts_of_all_ranks_give_the_whole_adapter(tmp_path, shares, is_in_order, has_expert_ranks):
    spec = read_model_spec(write_checkpoint(tmp_path / "moe", "qwen3_moe"))
    whole = {"lm_head.weight": (spec.vocab_size, spec.hidden_size), **parameter_shapes(spec)}
    placements = linear_placements(spec, 0, shares) if has_expert_ranks else None
    shards = [DeviceShard.of(spec, rank, shares, is_in_order, placements) for rank in range(len(shares))]
    names = frozenset(name for name in whole if shards[0].is_row_parallel(name))
    parts = [AdapterShard(shard, names) for shard in shards]
    rows, columns = whole["layers.0.experts.gate_up.weight"][1:]
    linear = {**adaptable_shapes(whole), "layers.0.experts.2.up": (rows // 2, columns)}
    linear["layers.1.experts.3.down"] = whole["layers.1.experts.down.weight"][1:]
    for name, (num_outputs, num_inputs) in linear.items():
        pair = LowRankPair(torch.randn(RANK, num_inputs), torch.randn(num_outputs, RANK))
        own = [part for each in parts for part in each.pairs(name, pair).values()]
        if f"{name}.weight" in names or ("experts" in name and "down" in name and not is_in_order):
            found = torch.cat([part.b @ part.a for part in own], 1)
        elif len(own[0].b) == num_outputs:
            found = own[0].b @ own[0].a
        else:
            found = torch.cat([part.b for part in own]) @ pair.a
        is_shared = name.endswith((".k", ".v")) and len(found) > num_outputs  # ranks that share a KV head
        assert is_shared or torch.allclose(found, pair.b @ pair.a, atol=1e-5)
        for each in parts:
            for local, part in each.pairs(name, pair).items():
                if f"{local}.weight" in each.shapes():
                    assert each.shapes()[f"{local}.weight"] == (len(part.b), part.a.shape[1])
