"""HostedStorages: memory of device tensors that is moved to the host for a while; and memory that is released."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the memory of tensors, once where several share it. Without what torch cannot free, such as views of files."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.resizable() and storage.nbytes() > 0:
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Hosted:
    storage: torch.UntypedStorage
    copy: Tensor


class HostedStorages:
    """Holds copies of storages in host memory; on the device they are empty until `restore`.

    The tensors stay the same objects. Their addresses change, so that CUDA graphs which use them have to be captured again.
    """

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Copy the storages to the host and free them on the device. Waits for the device."""
        self._hosted: list[_Hosted] = []
        for storage in storages:
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8)
            self._hosted.append(_Hosted(storage, copy.copy_(bytes_of(storage))))
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        """Bytes on the host."""
        return sum(hosted.copy.numel() for hosted in self._hosted)

    def restore(self) -> None:
        """Copy everything back to the device."""
        while self._hosted:
            hosted = self._hosted.pop()
            hosted.storage.resize_(hosted.copy.numel())
            bytes_of(hosted.storage).copy_(hosted.copy)


class ReleasedStorages:
    """Storages without memory until `restore`, after which their values are undefined."""

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Free the storages."""
        self._released = [(storage, storage.nbytes()) for storage in storages]
        for storage, _ in self._released:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the memory again."""
        for storage, num_bytes in self._released:
            storage.resize_(num_bytes)
        self._released = []


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return the bytes of a storage [N] u8, as a view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
