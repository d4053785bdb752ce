"""What transformers would generate greedily, found without generating: it sees a whole output at once."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


def greedy_choices(model: PreTrainedModel, prompt: list[int], output: list[int], allows_end: bool = True) -> list[int]:
    """Return the token that the model chooses at each place of an output, given the prompt and the output before it.

    Equal to the output exactly where greedy generation gives it: by induction both have the same tokens before each place.
    In float32 alone, where sums of other shapes do not round to other tokens.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
        if not allows_end:
            ends = model.generation_config.eos_token_id
            assert ends is not None
            logits[:, ends] = -torch.inf
        return logits.argmax(dim=-1).tolist()
