"""What only the torch decoder runs: neither the native kernels nor those of GPUs do."""

from __future__ import annotations

from quire.contracts.model_spec import LayerSpec, MlpSpec, ModelSpec


def reference_only(spec: ModelSpec) -> str | None:
    """Return what a model has that only the torch decoder runs; None where it has nothing of that kind."""
    return next((found for layer in spec.layers if (found := reference_only_layer(layer)) is not None), None)


def reference_only_layer(layer: LayerSpec) -> str | None:
    """Return what a layer has that only the torch decoder runs; None where it has nothing of that kind."""
    mlp = layer.mlp
    has = {
        "a shared block before the mixer": layer.shared_block is not None,
        "several residual streams (AltUp)": layer.altup is not None,
        "a low-rank residual (LAuReL)": layer.laurel is not None,
        "sparse activations": isinstance(mlp, MlpSpec) and mlp.sparsity > 0,
    }
    return next((name for name, is_so in has.items() if is_so), None)
