"""Find and read the specifications of draft models and heads, before their weights are loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from quire.base.errors import ConfigError, UnsupportedError
from quire.base.logging import get_logger
from quire.contracts.memory import ModelReport
from quire.contracts.model_spec import ModelSpec
from quire.contracts.speculative import SpeculativeConfig
from quire.model.config_reader import read_model_spec
from quire.model.heads.build import find_head_kind, read_layer_head, read_parallel_head
from quire.model.heads.head_spec import LayerHead, ParallelHead
from quire.model.resolve import resolve_model

logger = get_logger(__name__)

_LayerKind = Literal["eagle", "eagle3", "mtp"]
LAYER_KINDS: dict[str, _LayerKind] = {"eagle": "eagle", "eagle3": "eagle3", "mtp": "mtp", "deepseek_mtp": "mtp"}
"""Methods that draft with a head that has a decoder layer, and the layout of each."""


def settle_method(config: SpeculativeConfig) -> SpeculativeConfig:
    """Return a configuration with its method; if none is given, the folder of its model decides. Raises ConfigError."""
    if config.method is not None or not isinstance(config.model, str):
        return config
    return replace(config, method=find_head_kind(_find(config.model, config.revision)) or "draft_model")


def find_draft_model(config: SpeculativeConfig, report: ModelReport) -> tuple[Path, ModelSpec]:
    """Return the folder and the spec of the draft model for the report's model.

    Raises ConfigError, ModelFormatError or UnsupportedError.
    """
    model, target = str(config.model_of("draft_model")), report.spec
    folder = _find(model, config.revision)
    spec = _read_draft_spec(model, folder)
    if spec.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model {model} has a vocabulary of {spec.vocab_size}, the model one of {target.vocab_size}; "
            "take a draft model with the same tokenizer"
        )
    if spec.chain_reason is not None:
        raise ConfigError(
            f"speculative_config: model: {model} ({spec.model_type!r}) has {spec.chain_reason}, which no draft model may have; "
            "take another one, or the method 'ngram' or 'suffix'"
        )
    return folder, spec


def find_layer_head(config: SpeculativeConfig, method: str, report: ModelReport) -> tuple[Path, LayerHead]:
    """Return the folder and the head of a method of LAYER_KINDS. Raises as find_draft_model does."""
    kind = LAYER_KINDS[method]
    folder = _find_head(config, method, kind, report)
    return folder, read_layer_head(folder, kind, report.spec)


def find_parallel_head(config: SpeculativeConfig, report: ModelReport) -> tuple[Path, ParallelHead]:
    """Return the folder and the specification of Medusa heads. Raises as find_draft_model does."""
    folder = _find_head(config, "medusa", "medusa", report)
    return folder, read_parallel_head(folder, report.spec)


def check_device_sources(config: SpeculativeConfig, report: ModelReport) -> None:
    """Check that the drafters of all methods exist and can run on a GPU. Raises as find_draft_model does."""
    for method in config.methods:
        if method == "draft_model":
            find_draft_model(config, report)
        elif method == "medusa":
            find_parallel_head(config, report)
        elif method in LAYER_KINDS:
            folder, head = find_layer_head(config, method, report)
            if config.top_k > 1 and any(layer.attention.window is not None for layer in head.body.layers):
                raise UnsupportedError(
                    f"speculative_config: draft_top_k is {config.top_k}, but the head {folder} has sliding-window attention, "
                    "for which draft trees are not supported on a GPU; set draft_top_k to 1, or device to 'cpu'"
                )


_FOR_STATES = ("ngram", "suffix", "draft_model")
"""Methods that draft chains and read nothing of the model that verifies."""


def check_state_drafts(config: SpeculativeConfig, spec: ModelSpec) -> None:
    """Raise ConfigError where a model that verifies chains only (ModelSpec.chain_reason) cannot verify what a configuration
    drafts: trees, or drafts of methods that read or run the model itself."""
    if spec.chain_reason is None:
        return
    why = f"a {spec.model_type!r} model has {spec.chain_reason}"
    refused = [method for method in config.methods if method not in _FOR_STATES]
    if refused:
        raise ConfigError(
            f"speculative_config: method {refused[0]!r} is not supported: {why}; choose {' or '.join(_FOR_STATES)}"
        )
    if len(config.methods) > 1:
        raise ConfigError(
            f"speculative_config: method has {len(config.methods)} values, but their drafts become a tree, and {why}; give one"
        )
    if config.suffix_decoding_use_tree_spec:
        raise ConfigError(f"speculative_config: suffix_decoding_use_tree_spec drafts trees, but {why}; set it to false")


def longest_drafted(config: SpeculativeConfig, spec: ModelSpec, report: ModelReport) -> int:
    """Return the maximum length of a sequence for a drafter; log it if the model's is longer."""
    most = report.memory.max_model_len
    longest = min(spec.max_positions, most if config.max_model_len is None else min(most, config.max_model_len))
    if longest < most:
        logger.info("drafts are limited to the first %d tokens of a sequence, of %d at most", longest, most)
    return longest


def _find(model: str, revision: str | None) -> Path:
    try:
        return resolve_model(model, revision)
    except ConfigError as error:
        raise ConfigError(f"speculative_config: model: {error}") from None


def _find_head(
    config: SpeculativeConfig, method: str, kind: Literal["eagle", "eagle3", "medusa", "mtp"], report: ModelReport
) -> Path:
    """Return the folder of a method's head, by default the model's own. Raises ConfigError for a head of another kind."""
    model = config.model_of(method)
    if model is None:
        return report.folder
    folder = _find(model, config.revision)
    found = find_head_kind(folder)
    if found is not None and found != kind:
        raise ConfigError(f'speculative_config: {model} is a head of another kind; use it with "method": "{found}"')
    return folder


def _read_draft_spec(model: str, folder: Path) -> ModelSpec:
    kind = find_head_kind(folder)
    if kind is not None:
        raise ConfigError(f'speculative_config: {model} is not a draft model but a draft head; use it with "method": "{kind}"')
    try:
        return read_model_spec(folder, "auto")
    except UnsupportedError as error:
        heads = 'for a draft head set its method: "eagle", "eagle3", "medusa" or "mtp"'
        raise UnsupportedError(f"speculative_config: the draft model {model} cannot be used: {error}; {heads}") from None
