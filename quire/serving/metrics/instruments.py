"""Counter, Gauge and Histogram: plain numbers that a prometheus_client registry collects.

Used only by the event loop, so without locks. A histogram finds its bucket by bisection, and an observation takes a few
tenths of a microsecond.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from quire.base.errors import InvariantError

C = TypeVar("C")

MAX_LABEL_VALUES = 512
"""The maximum number of label value sets of one metric; further ones are counted under "other"."""


class Cell:
    """One number of a counter or gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Add to the number."""
        self.value += amount

    def set(self, value: float) -> None:
        """Replace the number."""
        self.value = value


class Buckets:
    """The observations of one histogram: counts by bucket, and their sum."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound, observations up to it) pairs for the exposition, "+Inf" last."""
        total = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return rows


class _Family(Generic[C]):
    """The cells of one metric by its label values; the labels common to all metrics come first."""

    def __init__(self, name: str, text: str, constant: dict[str, str], labels: Sequence[str], make: Callable[[], C]) -> None:
        self.name, self.text = name, text
        self.label_names = (*constant, *labels)
        self._constant = tuple(constant.values())
        self._num_labels = len(labels)
        self._make = make
        self.cells: dict[tuple[str, ...], C] = {}
        self._by_values: dict[tuple[str, ...], C] = {}
        if not labels:
            self.labels()

    def labels(self, *values: str) -> C:
        """Return the cell of these label values, created at its first use; beyond MAX_LABEL_VALUES the cell "other"."""
        cell = self._by_values.get(values)
        if cell is not None:
            return cell
        if len(values) != self._num_labels:
            raise InvariantError(f"metric {self.name} has {self._num_labels} labels, got {len(values)} values")
        if len(self.cells) >= MAX_LABEL_VALUES:
            values = ("other",) * self._num_labels
        cell = self._by_values[values] = self.cells.setdefault((*self._constant, *values), self._make())
        return cell


class Counter(_Family[Cell]):
    """A number that only grows; exported as `name`_total."""

    def __init__(self, name: str, text: str, constant: dict[str, str], labels: Sequence[str] = ()) -> None:
        super().__init__(name, text, constant, labels, Cell)

    def collect(self) -> Metric:
        """Return the family for the exposition."""
        family = CounterMetricFamily(self.name, self.text, labels=self.label_names)
        for values, cell in self.cells.items():
            family.add_metric(values, cell.value)
        return family


class Gauge(_Family[Cell]):
    """A number that goes up and down. With `reads` it is read at every collection instead of being set.

    reads  (label values, function) for each sample; a function that returns None omits its sample
    """

    def __init__(
        self,
        name: str,
        text: str,
        constant: dict[str, str],
        labels: Sequence[str] = (),
        reads: Sequence[tuple[tuple[str, ...], Callable[[], float | None]]] = (),
    ) -> None:
        super().__init__(name, text, constant, labels, Cell)
        self.reads = tuple(reads)

    def clear(self) -> None:
        """Forget all cells: what they stood for may no longer be there."""
        self.cells.clear()
        self._by_values.clear()

    def only(self, *values: str, num_fixed: int = 0) -> None:
        """Set the cell of these label values to 1, and all others with the same first num_fixed values to 0."""
        fixed = (*self._constant, *values[:num_fixed])
        for others, cell in self.cells.items():
            if others[: len(fixed)] == fixed:
                cell.value = 0.0
        self.labels(*values).value = 1.0

    def replace(self, value: float, *values: str) -> None:
        """Set the cell of these label values, and forget all others."""
        self.cells.clear()
        self._by_values.clear()
        self.labels(*values).value = value

    def collect(self) -> Metric:
        """Return the family for the exposition."""
        family = GaugeMetricFamily(self.name, self.text, labels=self.label_names)
        if self.reads:
            for values, read in self.reads:
                value = read()
                if value is not None:
                    family.add_metric((*self._constant, *values), value)
            return family
        for values, cell in self.cells.items():
            family.add_metric(values, cell.value)
        return family


class Histogram(_Family[Buckets]):
    """Counts of values by buckets. `bounds` ascend; +Inf is added."""

    def __init__(
        self, name: str, text: str, constant: dict[str, str], bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> None:
        self.bounds = tuple(bounds)
        super().__init__(name, text, constant, labels, lambda: Buckets(self.bounds))

    def collect(self) -> Metric:
        """Return the family for the exposition."""
        family = HistogramMetricFamily(self.name, self.text, labels=self.label_names)
        for values, cell in self.cells.items():
            family.add_metric(values, cell.cumulative(), cell.sum)
        return family


Instrument = Counter | Gauge | Histogram


class InstrumentCollector:
    """Returns the families of all instruments to a registry."""

    def __init__(self, instruments: Iterable[Instrument]) -> None:
        self._instruments = list(instruments)

    def collect(self) -> Iterable[Metric]:
        """Return all families, in the order of definition."""
        return [instrument.collect() for instrument in self._instruments]
