"""Calibration of self-speculation: which layers a model can skip in drafting, and the expected speedup."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tqdm import tqdm

from quire.base.errors import ConfigError
from quire.bench.provenance import Provenance, find_provenance
from quire.contracts.config import EngineConfig
from quire.model.build import build_model, effective_max_model_len
from quire.model.checkpoint import open_parameters, tie_missing_head
from quire.model.config_reader import read_model_spec
from quire.model.resolve import resolve_model
from quire.speculate.layer_probe import LayerProbe
from quire.text.tokenizer import load_tokenizer

_MAX_DRAFTS = 8
_LEAST_AGREEMENT = 0.2
_WINDOW_TOKENS = 512
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """A choice of layers to skip.

    agreement   share of positions at which the most likely next token stays the same without them
    draft_cost  time of a draft relative to a plain step
    num_tokens  number of drafts with the highest speedup
    speed_up    expected over plain greedy decoding of one sequence, assuming independent acceptance of drafts
    """

    skipped_layers: tuple[int, ...]
    agreement: float
    draft_cost: float
    num_tokens: int
    speed_up: float

    def config(self) -> str:
        """Return the speculative_config with these layers, as JSON."""
        layers = {"skipped_layers": list(self.skipped_layers), "num_speculative_tokens": self.num_tokens}
        return json.dumps({"method": "self", **layers})


@dataclass(frozen=True, slots=True)
class LayerCalibration:
    """The best choice found for every number of skipped layers, and its provenance."""

    model: str
    num_layers: int
    num_places: int
    choices: tuple[LayerChoice, ...]
    provenance: Provenance

    @property
    def best(self) -> LayerChoice:
        """The choice with the highest expected speedup."""
        return max(self.choices, key=lambda choice: choice.speed_up)

    def describe(self) -> str:
        """Return the results as readable lines."""
        lines = [f"{'skipped':>7}{'agreement':>11}{'draft cost':>12}{'drafts':>8}{'speed-up':>10}  layers"]
        for choice in self.choices:
            layers = " ".join(map(str, choice.skipped_layers))
            lines.append(
                f"{len(choice.skipped_layers):>7}{choice.agreement:>11.3f}{choice.draft_cost:>12.2f}{choice.num_tokens:>8}"
                f"{choice.speed_up:>10.2f}  {layers}"
            )
        if self.best.speed_up > 1.0:
            lines.append(f"--speculative-config '{self.best.config()}'")
        else:
            lines.append("no choice is expected to gain anything: this model does not draft well for itself")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the results as JSON."""
        return json.dumps(asdict(self), indent=2)


def calibrate_layers(config: EngineConfig, text: str, num_tokens: int, show_progress: bool = False) -> LayerCalibration:
    """Skip one more layer at a time, the one without which most next tokens stay the same.

    num_tokens  number of tokens used from the start of the text. Raises ConfigError if it is too short
    """
    folder = resolve_model(config.model, config.revision)
    spec = read_model_spec(folder, config.dtype)
    spec = tie_missing_head(folder, spec) if config.allow_missing_head else spec
    tokens = load_tokenizer(folder).encode(text)[:num_tokens]
    longest = min(_WINDOW_TOKENS + 1, effective_max_model_len(spec, config.max_model_len) - _BLOCK_SIZE)
    windows = [tokens[begin : begin + longest] for begin in range(0, len(tokens), longest)]
    windows = [window for window in windows if len(window) > _BLOCK_SIZE]
    if not windows:
        raise ConfigError(f"the text has {len(tokens)} tokens; at least {_BLOCK_SIZE + 1} are needed")
    model = build_model(spec, open_parameters(folder, spec), longest + _BLOCK_SIZE, _BLOCK_SIZE)
    probe = LayerProbe(model, windows)
    choices = choose_layers(probe, len(spec.layers), show_progress)
    return LayerCalibration(config.model, len(spec.layers), probe.num_places, tuple(choices), find_provenance())


def choose_layers(probe: LayerProbe, num_layers: int, show_progress: bool = False) -> list[LayerChoice]:
    """Return the best choices with one skipped layer, with two, and so on until drafts would hardly ever be accepted."""
    if num_layers < 2:
        raise ConfigError("the model has one layer, which cannot be skipped")
    step_costs = [1.0, *(probe.cost(1 + count) for count in range(1, _MAX_DRAFTS + 1))]
    kept = list(range(num_layers))
    choices: list[LayerChoice] = []
    for _ in tqdm(range(num_layers - 1), "layers", disable=not show_progress, leave=False):
        agreements = {layer: probe.agreement([other for other in kept if other != layer]) for layer in kept}
        worst = max(kept, key=lambda layer: agreements[layer])
        kept.remove(worst)
        skipped = tuple(layer for layer in range(num_layers) if layer not in kept)
        choices.append(_choice(skipped, agreements[worst], probe.cost(1, kept), step_costs))
        if agreements[worst] < _LEAST_AGREEMENT:
            break
    return choices


def _choice(skipped: tuple[int, ...], agreement: float, draft_cost: float, step_costs: Sequence[float]) -> LayerChoice:
    """step_costs  time of a step of the whole model with one token, two, and so on, relative to one token."""
    gains: list[float] = []
    tokens = 1.0
    for count in range(1, len(step_costs)):
        tokens += agreement**count
        gains.append(tokens / (step_costs[count] + count * draft_cost))
    best = max(range(len(gains)), key=lambda index: gains[index])
    return LayerChoice(skipped, agreement, draft_cost, best + 1, gains[best])
