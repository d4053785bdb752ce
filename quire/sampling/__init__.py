"""From logits to tokens: processors, keyed noise, sampler, log probabilities."""
