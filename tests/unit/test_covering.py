"""What the markers `covering` and `one_in` choose of the combinations of a test's parameters."""

from itertools import product

import pytest

from tests.covering import covering

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def without_plugins(monkeypatch):
    """What runs inside of a test needs no plugin, and loading them takes longer than its tests."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


SIZES = [(3,), (2, 7), (4, 4, 4), (1, 5, 3, 2)]


def rows_of(sizes):
    return [{f"p{i}": value for i, value in enumerate(row)} for row in product(*map(range, sizes))]


@pytest.mark.parametrize("sizes", SIZES)
def test_every_value_is_chosen_with_few_combinations(sizes):
    rows = rows_of(sizes)
    chosen = [rows[index] for index in covering(rows)]
    assert len(chosen) == max(sizes)
    assert all({row[f"p{i}"] for row in chosen} == set(range(size)) for i, size in enumerate(sizes))


@pytest.mark.parametrize("sizes", SIZES[1:])
def test_every_pair_is_chosen_when_pairs_are_asked_for(sizes):
    rows = rows_of(sizes)
    chosen = [rows[index] for index in covering(rows, strength=2)]
    for a in range(len(sizes)):
        for b in range(a):
            assert {(row[f"p{a}"], row[f"p{b}"]) for row in chosen} == set(product(range(sizes[a]), range(sizes[b])))
    assert len(chosen) < len(rows) or len(sizes) == 2


@pytest.mark.parametrize(
    ("marker", "num_quick", "num_slow"),
    [
        ("covering", 4, 4),
        ("covering(keep=False)", 4, 4),
        ("covering(strength=2)", 12, 4),
        ("one_in(5)", 3, 13),
        ("one_in(5, keep=False)", 3, 4),
    ],
)
def test_the_other_combinations_are_slow_or_left_out(pytester, marker, num_quick, num_slow):
    pytester.makeini("[pytest]\nmarkers =\n    covering\n    one_in\n    slow")
    pytester.makeconftest("""
        import pytest
        from tests.covering import mark_slow_combinations

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems(items):
            never = mark_slow_combinations(items)
            items[:] = [item for item in items if item not in never]
    """)
    pytester.makepyfile(f"""
        import pytest

        @pytest.mark.{marker}
        @pytest.mark.parametrize("x", [0, 1, 2, pytest.param(9, marks=pytest.mark.slow)])
        @pytest.mark.parametrize("y", range(4))
        def test_one(x, y):
            pass
    """)
    pytester.runpytest_inprocess("-m", "not slow").assert_outcomes(passed=num_quick, deselected=num_slow)
    pytester.runpytest_inprocess("-m", "slow").assert_outcomes(passed=num_slow, deselected=num_quick)


def test_slow_combinations_are_thinned_to_those_that_have_each_value(pytester):
    pytester.makeini("[pytest]\nmarkers =\n    slow")
    pytester.makeconftest("""
        from tests.covering import redundant_slow_combinations

        def pytest_collection_modifyitems(items):
            redundant = redundant_slow_combinations(items)
            items[:] = [item for item in items if item not in redundant]
    """)
    pytester.makepyfile("""
        import pytest

        @pytest.mark.parametrize("y", [0, 1, 2, pytest.param(9, marks=pytest.mark.slow)])
        @pytest.mark.parametrize("x", [0, 1, pytest.param(9, marks=pytest.mark.slow)])
        def test(x, y):
            pass

        @pytest.mark.slow
        def test_without_parameters():
            pass
    """)
    pytester.runpytest_inprocess("-m", "not slow").assert_outcomes(passed=6, deselected=6)
    # (9, 0), (9, 1), (9, 2) and (0, 9), (1, 9), (9, 9): one of them, (9, 9), has only values that others have.
    pytester.runpytest_inprocess("-m", "slow").assert_outcomes(passed=6, deselected=6)
