import pytest

from quire.serving.errors import ApiError
from quire.serving.hosts import HostCheck


@pytest.mark.parametrize("host", ["quire.example", "Quire.Example:8000", "[::1]:8000", None])
def test_host_is_answered_when_its_name_is_allowed(host):
    HostCheck(("Quire.Example", "::1")).check(host)


@pytest.mark.parametrize("host", ["other.example", "", "[zz]", "]a[", "x@quire.example", "quire.example\x00", "ü"])
def test_host_is_refused_when_its_name_is_not_allowed_or_no_name(host):
    with pytest.raises(ApiError) as caught:
        HostCheck(("quire.example", "::1")).check(host)
    assert (caught.value.status, caught.value.code) == (403, "host_not_allowed")


def test_all_hosts_are_answered_when_a_star_is_among_the_names():
    HostCheck(("*", "localhost")).check("[zz]")
