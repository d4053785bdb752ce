"""LoRARequest: the LoRA adapter of a request."""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.errors import RequestError

MAX_LORA_NAME_LENGTH = 256


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter as a request names it, with the fields of vLLM. Raises RequestError.

    lora_name    what outputs and errors call it, and what clients of a server give as `model`
    lora_int_id  at least 1; requests of one adapter have the same number
    lora_path    folder with adapter_config.json and adapter_model.safetensors or adapter_model.bin (PEFT)
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        name, number = self.lora_name, self.lora_int_id
        is_name = isinstance(name, str) and 0 < len(name) <= MAX_LORA_NAME_LENGTH and name.isprintable()
        if not is_name:
            raise RequestError(
                f"lora_name must be printable text of 1 to {MAX_LORA_NAME_LENGTH} characters, got {name!r:.100}", "lora_name"
            )
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number < 2**63:
            raise RequestError(f"lora_int_id must be an integer from 1 to 2**63 - 1, got {number!r}", "lora_int_id")
        if not isinstance(self.lora_path, str) or not self.lora_path or "\0" in self.lora_path:
            raise RequestError(f"lora_path must be the path of a folder, got {self.lora_path!r:.100}", "lora_path")


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """An adapter that a worker has loaded.

    key        hash of its files; the worker and the prefix cache know it by this
    rank       the largest of its modules
    num_bytes  of its weights in memory
    """

    key: str
    rank: int
    num_modules: int
    num_bytes: int
