"""Latent attention to the keys that an indexer chooses, by the native kernels."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from quire.base.errors import ConfigError
from quire.contracts.model_spec import (
    AttentionSpec,
    IndexerSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
)
from quire.kernels.native import load_native
from quire.kernels.reference.indexed_attention import IndexQueries, choose_keys
from quire.model.build import whole_prompt_logits
from quire.model.decoder import Decoder
from quire.model.native_decoder import NativeDecoder
from quire.model.parameters import parameter_shapes
from quire.speculate.layer_skip import kept_layers
from tests.unit.model.test_batch_invariance import Bench, on_threads

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels are not built")

NORM, VOCAB_SIZE, MAX_MODEL_LEN = NormSpec("rms", 1e-6), 60, 1200
INDEXER = IndexerSpec(5, 10, 70, NormSpec("layer", 1e-6, has_bias=True))


def spec_of(dtype, top_k=70, q_rank=20, is_interleaved=False, is_shared=False):
    """Return a model of two layers; top_k None: without an indexer; is_shared: the second takes the choice of the first."""
    indexer = None if top_k is None else replace(INDEXER, top_k=top_k, is_interleaved=is_interleaved)
    latent = LatentSpec(q_rank, 32, 8, 6, 10, NORM, indexer=indexer)
    attention = AttentionSpec(3, 1, 38, 14**-0.5, rope=RopeSpec(6, 1e4), latent=latent)
    layer = LayerSpec(attention, MlpSpec(40, "silu"), attn_in=NORM, mlp_in=NORM)
    second = layer
    if is_shared:
        second = replace(layer, attention=replace(attention, latent=replace(latent, indexer=replace(indexer, is_shared=True))))
    return ModelSpec("deepseek_v32", dtype, VOCAB_SIZE, 48, (layer, second), NORM, MAX_MODEL_LEN)


def parameters_of(spec, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = parameter_shapes(replace(spec, layers=spec_of(spec.dtype, q_rank=spec.layers[0].attention.latent.q_rank).layers))
    found = {}
    for name, shape in shapes.items():
        scale, mean = (0.2, 1.0) if "norm" in name or name.endswith("_in.weight") else (0.3, 0.0)
        found[name] = (torch.randn(shape, generator=generator) * scale + mean).to(getattr(torch, spec.dtype))
    return {name: found[name] for name in parameter_shapes(spec)}


def native(spec, parameters):
    return NativeDecoder(load_native(), spec, dict(parameters), MAX_MODEL_LEN)


def test_layers_that_draft_need_the_layer_whose_choice_they_share():
    spec = spec_of("float32", is_shared=True)
    assert kept_layers(spec, [1]) == (0,)
    with pytest.raises(ConfigError, match="skipped_layers names layer 0, but layer 1 attends to the keys that it chooses"):
        kept_layers(spec, [0])


def prompt_of(length):
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_queries_that_attend_to_all_keys_have_the_bits_of_dense_attention(dtype):
    indexed, dense, prompt = spec_of(dtype, top_k=300), spec_of(dtype, top_k=None), prompt_of(300)
    expected = whole_prompt_logits(native(dense, parameters_of(dense)), prompt)
    assert torch.equal(whole_prompt_logits(native(indexed, parameters_of(indexed)), prompt), expected)


@pytest.mark.parametrize(
    ("q_rank", "is_interleaved", "is_shared"), [(20, False, False), (None, True, False), (20, False, True)]
)
def test_chosen_keys_are_those_of_torch(q_rank, is_interleaved, is_shared):
    spec, prompt = spec_of("float32", 70, q_rank, is_interleaved, is_shared), prompt_of(150)
    parameters = parameters_of(spec)
    expected = whole_prompt_logits(Decoder(spec, parameters, MAX_MODEL_LEN), prompt)
    assert (whole_prompt_logits(native(spec, parameters), prompt) - expected).abs().max() < 1e-4


def test_of_equal_scores_the_first_keys_are_chosen():
    spec, prompt = spec_of("float32"), prompt_of(150)
    parameters = parameters_of(spec)
    parameters |= {name: torch.zeros_like(each) for name, each in parameters.items() if "index_weights" in name}
    queries = IndexQueries(torch.randn(2, 5, 10), torch.zeros(2, 5))
    is_hidden = torch.tensor([[False] * 100 + [True] * 20, [False] * 120])
    assert choose_keys(queries, torch.randn(120, 10), is_hidden, INDEXER).nonzero()[:, 1].tolist() == 2 * list(range(70))
    expected = whole_prompt_logits(Decoder(spec, parameters, MAX_MODEL_LEN), prompt)
    assert (whole_prompt_logits(native(spec, parameters), prompt) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("dtype", "is_shared"), [("float32", False), ("bfloat16", True)])
def test_logits_do_not_depend_on_chunks_other_sequences_and_threads(dtype, is_shared):
    spec = spec_of(dtype, 1020, is_shared=is_shared)
    decoder, rng, sequences = native(spec, parameters_of(spec)), random.Random(4), [prompt_of(1060), prompt_of(1024)]
    alone = [Bench(decoder, [tokens], rng) for tokens in sequences]
    for bench, tokens in zip(alone, sequences, strict=True):
        bench.step([(0, len(tokens))])
    both = Bench(decoder, sequences, rng)
    with on_threads(2):
        for parts in ([(0, 1015), (1, 1021)], [(0, 7), (1, 1)], [(1, 1), (0, 1)], [(1, 1), (0, 20)], [(0, 17)]):
            both.step(parts)
    assert not both.unfinished()
    for index, bench in enumerate(alone):
        assert all(torch.equal(both.logits[index][at], row) for at, row in bench.logits[0].items())
