"""One question to several clusters: the best layout on each, the largest batch that fits, and the cost of a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spanax.displays import display, display_text
from spanax.errors import ConflictError, FormatError, RangeError, SpanaxError
from spanax.hardware.chips import chip_named, chip_names
from spanax.hardware.cluster import Cluster, cluster_of
from spanax.plan.advice.summary import Summary, summarize
from spanax.plan.candidate import Search
from spanax.plan.plan import Plan


@dataclass(frozen=True)
class Quote:
    """The answer of one cluster.

    Attributes:
      on: the name that was asked for.
      cluster: the cluster; None if there is none of this name.
      summary: its search; None if it cannot be planned.
      plan: the plan of the best layout; None if nothing fits.
      largest: a search at the largest batch that fits; None if there is none.
      problem: why there is no plan, or only no largest batch; empty if there are both.
      dollars_per_hour: the price of a device for an hour; None if unknown.
    """

    on: str
    cluster: Cluster | None = None
    summary: Summary | None = None
    plan: Plan | None = None
    largest: Search | None = None
    problem: str = ""
    dollars_per_hour: float | None = None

    @property
    def search(self) -> Search | None:
        """The search; None if the cluster cannot be planned, or nothing fits."""
        return None if self.plan is None or self.summary is None else self.summary.search

    @property
    def dollars_per_hour_of_all(self) -> float | None:
        """The price of all devices of the cluster for an hour."""
        if self.cluster is None or self.dollars_per_hour is None:
            return None
        return self.dollars_per_hour * self.cluster.num_devices


@dataclass(frozen=True)
class Quotes(Sequence[Quote]):
    """The answers of several clusters, in the order in which they were asked for; prints as a table.

    Attributes:
      quotes: one per cluster.
      tokens: the tokens of a run whose cost is asked for, if any.
      examples: the examples of a run whose cost is asked for, if any.
    """

    quotes: tuple[Quote, ...] = field(repr=False)
    tokens: float | None = None
    examples: float | None = None

    def __len__(self) -> int:
        return len(self.quotes)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # an int or a slice, as in a tuple
        return self.quotes[index]

    def __str__(self) -> str:
        return display_text(self)

    def _repr_html_(self) -> str:
        return display(self)

    def priced(
        self, prices: Mapping[str, float] | None = None, *, tokens: float | None = None, examples: float | None = None
    ) -> "Quotes":
        """Returns the answers with the cost of a run.

        Args:
          prices: dollars per device-hour by chip or cluster file; others have the price of their cluster file, if any.
          tokens: the tokens of the run.
          examples: the examples of the run, for a model without tokens.

        Raises:
          SpanaxError: a price is no price, or of a device in none of the clusters.
        """
        dollars = dollars_of(prices or {}, [quote.cluster for quote in self.quotes])
        quotes = [replace(quote, dollars_per_hour=price) for quote, price in zip(self.quotes, dollars, strict=True)]
        return Quotes(tuple(quotes), tokens, examples)

    def device_hours(self, quote: Quote) -> float | None:
        """Returns the device-hours of the run on one cluster; None without a run, or without tokens to count."""
        search = quote.search
        if search is None or search.best is None:
            return None
        if self.examples is not None:
            steps = self.examples / search.batch_size
        elif self.tokens is not None and search.tokens_per_step is not None:
            steps = self.tokens / search.tokens_per_step
        else:
            return None
        return steps * search.best.step_seconds / 3600 * search.cluster.num_devices


def quoted(
    clusters: Sequence[Cluster | str],
    search_on: Callable[[Cluster], Search],
    plan_of: Callable[[Cluster, Search], Plan],
    largest_on: Callable[[Cluster], Search | None],
    remedies_of: Callable[[Search], list[str]],
) -> Quotes:
    """Returns the answer of every cluster; an error of one is its answer, and the others answer, too.

    Args:
      clusters: the clusters, or their names.
      search_on: searches the layouts on a cluster.
      plan_of: returns the plan of such a search.
      largest_on: returns a search at the largest batch that fits.
      remedies_of: returns what would make a layout of a search fit.
    """
    quotes = []
    for name in clusters:
        quote = Quote(str(name))
        try:
            cluster = cluster_of(name)
        except SpanaxError as error:
            quotes.append(_with_problem(quote, error))
            continue
        quote = replace(quote, cluster=cluster)
        try:
            quote = _answered(quote, search_on(cluster), plan_of, remedies_of)
        except SpanaxError as error:
            quote = _with_problem(quote, error)
        try:
            quote = replace(quote, largest=largest_on(cluster))
        except SpanaxError as error:
            quote = _with_problem(quote, error)
        quotes.append(quote)
    return Quotes(tuple(quotes))


def _answered(
    quote: Quote,
    search: Search,
    plan_of: Callable[[Cluster, Search], Plan],
    remedies_of: Callable[[Search], list[str]],
) -> Quote:
    """Returns the answer of a cluster with its search, and with its plan or why nothing fits."""
    summary = summarize(search, remedies_of(search))
    quote = replace(quote, summary=summary, dollars_per_hour=search.cluster.chip.dollars_per_hour)
    if summary.best is not None:
        return replace(quote, plan=plan_of(search.cluster, search))
    fits_with = "; or with ".join(summary.remedies)
    return replace(quote, problem=f"nothing fits: {summary.shortfall}; it fits with {fits_with}")


def _with_problem(quote: Quote, error: SpanaxError) -> Quote:
    """Returns the answer of a cluster with the first error that it raised."""
    lines = [line.strip() for line in str(error).splitlines()]
    return replace(quote, problem=quote.problem or "; ".join(lines))


def dollars_of(prices: Mapping[str, float], clusters: Sequence[Cluster | None]) -> list[float | None]:
    """Returns the dollars per device-hour of each cluster: the given price, or that of its cluster file.

    Raises:
      SpanaxError: a price is no finite number >= 0, or of a device that is unknown or in none of the clusters.

    Example:
      >>> from spanax.hardware.cluster import cluster
      >>> dollars_of({"h100": 2.9}, [cluster("h100:8"), cluster("v5e:4x4")])
      [2.9, None]
    """
    dollars = [None if each is None else each.chip.dollars_per_hour for each in clusters]
    for name, price in prices.items():
        if not 0 <= price < math.inf:
            raise RangeError(
                f"the price of {name} is {price}; expected dollars per device-hour >= 0.", fix=f"{name}=2.5"
            )
        places = [place for place, each in enumerate(clusters) if each is not None and _is_named(each, name)]
        if not places and name.lower() not in chip_names() and not name.endswith(".toml"):
            chip_named(name, where=f"a price of {name}")  # raises
        if not places and None not in clusters:
            asked = ", ".join(dict.fromkeys(each.file or each.chip.name for each in clusters if each is not None))
            raise ConflictError(f"there is a price of {name}, and no cluster has it.", where=f"devices: {asked}")
        for place in places:
            dollars[place] = float(price)
    return dollars


def checked_prices(texts: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    """Returns `prices_of` the values of --price, checked before the clusters of these names are planned.

    Raises:
      SpanaxError: as `prices_of` and `dollars_of`.
    """
    prices = prices_of(texts)
    clusters = list[Cluster | None]()
    for name in names:
        try:
            clusters.append(cluster_of(name))
        except SpanaxError:
            clusters.append(None)  # its row says why
    dollars_of(prices, clusters)
    return prices


def _is_named(cluster: Cluster, name: str) -> bool:
    """Whether a name is that of the devices of a cluster."""
    known = chip_names()
    own = (cluster.file, cluster.chip.name) if cluster.file else (cluster.chip.name,)
    return name in own or known.get(name.lower(), "") == cluster.chip.name


def prices_of(texts: Sequence[str]) -> dict[str, float]:
    """Returns the dollars per device-hour by device, from the values of --price.

    Raises:
      SpanaxError: a text is not `device=number`, or two are of one device.

    Example:
      >>> prices_of(["h100=2.9", "a100=$1.5"])
      {'h100': 2.9, 'a100': 1.5}
    """
    prices = dict[str, float]()
    for text in texts:
        name, _, number = (part.strip() for part in text.rpartition("="))
        if name in prices:
            raise ConflictError(f"--price has two prices of {name}.", fix="one of them")
        try:
            prices[name] = float(number.removeprefix("$"))
        except ValueError:
            name = ""
        if not name:
            what = f"--price {text!r} is not a device and its dollars per device-hour."
            raise FormatError(what, fix="--price h100=2.9")
    return prices
