"""What `fissile top` shows of a router's statistics, in a terminal of any size."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fissile.results import Quantiles, Stats, Worker

UNKNOWN = "-"
MAX_DETAILS = 3
"""Of workers that are not as they should be."""
_PADDING = 2
"""Between two columns."""


class Sample:
    """What the router said, and when: `at` is seconds of some clock."""

    def __init__(self, at: float, stats: Stats) -> None:
        self.at = at
        self.stats = stats
        self.workers = {(worker.address, worker.epoch): worker for worker in stats.workers}
        """A worker that was started anew is another one: its counters are."""


Count = Callable[[Sample], int | None]
"""None: not there."""


class History:
    """Samples of the last `window` seconds: what is a counter at the router becomes a rate here."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._samples: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        if self.last and sample.stats.uptime < self.last.uptime:
            self._samples.clear()  # the router was started anew
        self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1].at < sample.at - self._window:
            self._samples.popleft()

    @property
    def last(self) -> Stats | None:
        return self._samples[-1].stats if self._samples else None

    def rate(self, count: Count) -> float | None:
        """A second; None if it cannot be said yet."""
        growth = self._growth(count)
        seconds = self._samples[-1].at - self._samples[0].at if self._samples else 0.0
        return None if growth is None or seconds <= 0 else growth / seconds

    def share(self, part: Count, whole: Count) -> float | None:
        """Of what came in the window; None if nothing did."""
        some, all_ = self._growth(part), self._growth(whole)
        return some / all_ if some is not None and all_ else None

    def _growth(self, count: Count) -> int | None:
        """From the first sample that has it."""
        counts = [value for value in map(count, self._samples) if value is not None]
        return counts[-1] - counts[0] if len(counts) > 1 else None


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cell: Callable[[Worker, History], str]
    rank: int
    """Of two that do not both fit, the one with the higher rank goes."""
    justify: Literal["left", "right"] = "right"


class Dashboard:
    """Drawn by rich. `problem`: why the numbers are old, if they are."""

    def __init__(self, address: str, history: History, problem: str = "") -> None:
        self._address = address
        self._history = history
        self._problem = problem

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        stats = self._history.last
        head: list[RenderableType] = []
        if self._problem:
            head.append(Text(f"{self._problem}; trying again", style="bold red"))
        if stats is not None:
            head += [self._router_line(stats), self._latency_line(stats)]
            odd = [worker for worker in stats.workers if worker.detail][:MAX_DETAILS]
            num_rows = options.max_height - len(head) - len(odd) - 2 if console.is_terminal else len(stats.workers)
            head.append(self._workers_table(stats, options.max_width, max(1, num_rows)))
            head += [Text(f"{worker.address}: {worker.detail}", style="red", no_wrap=True) for worker in odd]
        yield Group(*head)

    def _router_line(self, stats: Stats) -> Text:
        num_ended = self._history.rate(lambda seen: sum(seen.stats.finished.values()))
        num_tokens = self._history.rate(lambda seen: seen.stats.num_completion_tokens)
        parts = (
            f"{stats.num_open_requests} open",
            f"{stats.num_queued_requests} queued",
            f"{_number(num_ended, 1)} requests/s",
            f"{_number(num_tokens, 0)} tokens/s",
            f"up {_span(stats.uptime)}",
        )
        return Text.assemble((self._address, "bold"), " · ", " · ".join(parts))

    def _latency_line(self, stats: Stats) -> Text:
        shown = (("TTFT", stats.ttft), ("TPOT", stats.tpot), ("ITL", stats.itl), ("E2E", stats.e2e))
        parts = [f"{name} {_milliseconds(values)}" for name, values in shown]
        return Text("p50/p99 ms: " + " · ".join(parts), style="dim" if self._problem else "")

    def _workers_table(self, stats: Stats, width: int, num_rows: int) -> Table:
        # Those with a problem first, then by address: rows should not jump.
        workers = sorted(stats.workers, key=lambda worker: (worker.healthy, not worker.detail, worker.address))
        shown = workers if len(workers) <= num_rows else workers[: num_rows - 1]
        rows = {column: [column.cell(worker, self._history) for worker in shown] for column in _columns(stats)}
        columns = _fitting(rows, width)
        table = Table(box=None, pad_edge=False, padding=(0, _PADDING, 0, 0))
        for column in columns:
            table.add_column(column.title, justify=column.justify, no_wrap=True)
        for number, worker in enumerate(shown):
            style = "dim" if self._problem else "red" if worker.detail else ""
            table.add_row(*(rows[column][number] for column in columns), style=style)
        if len(shown) < len(workers):
            table.add_row(f"… {len(workers) - len(shown)} more")
        return table

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


def _fitting(rows: dict[_Column, list[str]], width: int) -> list[_Column]:
    """As many columns as there is room for; the address stays, whatever its length."""
    widths = {column: max(map(cell_len, (column.title, *cells))) + _PADDING for column, cells in rows.items()}
    columns = list(rows)
    while len(columns) > 1 and sum(widths[column] for column in columns) - _PADDING > width:
        columns.remove(max(columns, key=lambda column: column.rank))
    return columns


def _columns(stats: Stats) -> list[_Column]:
    """The model only where there are several, or versions of one."""
    has_models = len({_model(worker) for worker in stats.workers if worker.model}) > 1
    return [column for column in _COLUMNS if column is not _MODEL or has_models]


def _model(worker: Worker) -> str:
    """As `--version-shares` names it."""
    return f"{worker.model}@{worker.model_version}" if worker.model_version else worker.model or UNKNOWN


def _state(worker: Worker, _history: History) -> str:
    """A worker that is there and has a detail is on trial."""
    if not worker.healthy:
        return "down"
    return "ejected" if worker.detail else "up"


def _used(worker: Worker, _history: History) -> str:
    return f"{100 * worker.num_used_blocks / worker.num_blocks:.0f}%" if worker.num_blocks else UNKNOWN


def _hit_rate(worker: Worker, history: History) -> str:
    share = history.share(
        _of(worker, lambda seen: seen.num_prefix_hits), _of(worker, lambda seen: seen.num_prefix_queries)
    )
    return UNKNOWN if share is None else f"{100 * share:.0f}%"


def _tokens(worker: Worker, history: History) -> str:
    return _number(history.rate(_of(worker, lambda seen: seen.num_generated_tokens)), 0)


def _of(worker: Worker, count: Callable[[Worker], int]) -> Count:
    """A counter of this worker since this start of it."""

    def count_in(sample: Sample) -> int | None:
        seen = sample.workers.get((worker.address, worker.epoch))
        return None if seen is None else count(seen)

    return count_in


def _number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def _milliseconds(values: Quantiles) -> str:
    return f"{_short(values.p50)}/{_short(values.p99)}" if values.count else UNKNOWN


def _short(seconds: float) -> str:
    """Milliseconds, with what tells small ones apart."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:.1f}" if milliseconds < 10 else f"{milliseconds:.0f}"


def _span(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


_ADDRESS = _Column("worker", lambda worker, _: worker.address, 0, "left")
_MODEL = _Column("model", lambda worker, _: _model(worker), 5, "left")
_COLUMNS = (
    _ADDRESS,
    _Column("state", _state, 1, "left"),
    _MODEL,
    _Column("open", lambda worker, _: str(worker.num_open_requests), 9),
    _Column("running", lambda worker, _: str(worker.num_running), 2),
    _Column("waiting", lambda worker, _: str(worker.num_waiting), 3),
    _Column("KV", _used, 6),
    _Column("hits", _hit_rate, 8),
    _Column("TTFT", lambda worker, _: _milliseconds(worker.ttft), 7),
    _Column("TPOT", lambda worker, _: _milliseconds(worker.tpot), 10),
    _Column("tokens/s", _tokens, 4),
)
