"""What is the same in the encoders (BERT, RoBERTa, ModernBERT): the heads of their classifiers, and those of causal models."""

from __future__ import annotations

from collections.abc import Mapping

from quire.contracts.pooler_spec import HeadLayerSpec
from quire.contracts.pooling_params import Pooling

ROBERTA_TYPES = ("roberta", "xlm-roberta")
ENCODER_TYPES = ("bert", *ROBERTA_TYPES, "modernbert")


def classifier_layers(model_type: str, config: Mapping[str, object]) -> tuple[HeadLayerSpec, ...]:
    """Return the layers that a ...ForSequenceClassification class has after its pooled hidden state; the last gives logits."""
    if model_type == "bert":
        return (_dense("pooler.dense", activation="tanh"), _dense("classifier"))
    if model_type in ROBERTA_TYPES:
        return (_dense("classifier.dense", activation="tanh"), _dense("classifier.out_proj"))
    if model_type == "modernbert":
        return _modernbert_layers(config)
    return (_dense("score", has_bias=False),)


def classifier_pooling(model_type: str, config: Mapping[str, object]) -> Pooling:
    """Return what the class pools."""
    if model_type == "modernbert":
        return "mean" if config.get("classifier_pooling") == "mean" else "cls"
    return "cls" if model_type in ENCODER_TYPES else "last"


def _modernbert_layers(config: Mapping[str, object]) -> tuple[HeadLayerSpec, ...]:
    eps, has_norm_bias = config.get("norm_eps", 1e-5), config.get("norm_bias") is True
    norm = HeadLayerSpec(
        "norm",
        ("", "head.norm.weight"),
        ("", "head.norm.bias") if has_norm_bias else None,
        eps=eps if isinstance(eps, float) else 1e-5,
    )
    dense = _dense("head.dense", config.get("classifier_bias") is True, "gelu")
    return (dense, norm, _dense("classifier"))


def _dense(module: str, has_bias: bool = True, activation: str = "identity") -> HeadLayerSpec:
    bias = ("", f"{module}.bias") if has_bias else None
    return HeadLayerSpec("dense", ("", f"{module}.weight"), bias, activation)  # type: ignore[arg-type]
