"""SharedMemoryFile: areas that processes share, without leaks."""

import os
import subprocess
import sys

import numpy as np
import pytest

from quire.base.environment import environment_with_quire
from quire.base.errors import ConfigError, InvariantError
from quire.parallel.shared_memory import SharedMemoryFile
from tests.ranks import start_processes, statuses_of


def test_areas_are_aligned_zero_and_apart():
    memory = SharedMemoryFile.create({"a": 1, "b": 1000, "empty": 0, "c": 64})
    assert memory.area_names == ("a", "b", "empty", "c")
    for name, size in (("a", 1), ("b", 1000), ("empty", 0), ("c", 64)):
        area = memory.area(name)
        assert area.size == size
        assert not area.any()
        assert memory.address(name) % 64 == 0
        area[:] = ord(name[0])
    assert all((memory.area(name) == ord(name[0])).all() for name in memory.area_names)
    assert memory.area("b").__array_interface__["data"][0] == memory.address("b")


def test_child_that_inherits_the_descriptor_sees_and_changes_the_same_bytes():
    memory = SharedMemoryFile.create({"x": 64, "y": 64})
    memory.area("x")[:4] = [1, 2, 3, 4]
    code = (
        "import sys; from quire.parallel.shared_memory import SharedMemoryFile as F; m = F(int(sys.argv[1]));"
        "m.area('y')[:4] = m.area('x')[:4] * 2"
    )
    command = [sys.executable, "-c", code, str(memory.descriptor)]
    subprocess.run(command, pass_fds=[memory.descriptor], env=environment_with_quire(), check=True)
    assert memory.area("y")[:4].tolist() == [2, 4, 6, 8]


def test_forked_child_shares_the_mapping():
    memory = SharedMemoryFile.create({"x": 8})

    def body(_):
        memory.area("x").view(np.int64)[0] = 4711
        return 0

    assert statuses_of(start_processes(1, body)) == [0]
    assert memory.area("x").view(np.int64)[0] == 4711


def test_views_live_longer_than_the_file():
    memory = SharedMemoryFile.create({"x": 8})
    view = memory.area("x")
    memory.close()
    memory.close()
    with pytest.raises(InvariantError, match="closed"):
        _ = memory.descriptor
    del memory
    view[0] = 7
    assert view[0] == 7


def test_it_has_no_name_and_cannot_be_resized():
    memory = SharedMemoryFile.create({"x": 1 << 20})
    assert os.readlink(f"/proc/self/fd/{memory.descriptor}").startswith("/memfd:quire")
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 4096)


def test_large_areas_take_no_memory_until_they_are_used():
    memory = SharedMemoryFile.create({"x": 1 << 36})
    assert os.fstat(memory.descriptor).st_blocks * 512 < 1 << 20


def test_other_files_and_unknown_areas_are_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    for content in (b"x" * 8192, b""):
        path.write_bytes(content)
        descriptor = os.open(path, os.O_RDWR)
        with pytest.raises(ConfigError, match="not a shared memory file"):
            SharedMemoryFile(descriptor)
        os.close(descriptor)
    with pytest.raises(InvariantError, match="no area 'y'.*x"):
        SharedMemoryFile.create({"x": 1}).area("y")
    with pytest.raises(ConfigError, match="'x'"):
        SharedMemoryFile.create({"x": -1})
