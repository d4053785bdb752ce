"""What the server is told of an engine."""

from types import SimpleNamespace

from quire.contracts.kv_spec import KvSpec
from quire.serving.engine_client.engine_info import _attention_kinds
from quire.serving.engine_client.messages import AttentionKind


def test_layers_are_told_by_their_windows():
    windows = [512, 512, None, 512]
    shapes = ((2, 64), (2, 64), (1, 128), (2, 64))
    dims = [dim for _, dim in shapes]
    heads = [SimpleNamespace(window=window, num_heads=8, head_dim=dim) for window, dim in zip(windows, dims, strict=True)]
    spec = SimpleNamespace(layers=[SimpleNamespace(attention=one) for one in heads])
    kv = KvSpec(16, "bfloat16", shapes)
    found = _attention_kinds(spec, kv, (512, None))
    assert found == [AttentionKind(512, 3 * 2 * 2 * 64 * 2, 3 * 8 * 64), AttentionKind(None, 2 * 128 * 2, 8 * 128)]
    assert sum(kind.kv_bytes_per_token for kind in found) == kv.bytes_per_token
