"""Graphs of the forward pass, captured once at start-up: a step is then one launch, or one for each layer.

*Full* graphs serve steps of uniform rows alone, from the rows' slots to their logits; where all tokens are chosen
greedily, one more graph does that, too. (Ranks that share a vocabulary, and those of CPUs, need no logits for that:
there a full graph ends with the hidden states, and the head is in each of two graphs that can follow.) *Whole* graphs
are greedy steps of few rows with all that is ever launched for them, marks of time included. *Piecewise*
graphs serve all other steps: the cache layers, whose work depends on the rows' lengths, are the cuts, and everything
between two of them is one graph. All read and write the same memory, step after step: the step's buffers, and one pool
that all graphs share, which is right because the steps follow each other on one stream and a graph's results are used
up before the next is replayed.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from worker.attention.context import ForwardContext, forward_context
from worker.attention.interface import CacheBuilder, CacheLayer
from worker.core.batch import ScheduledBatch
from worker.kernels.step import StagedRows, Step
from worker.models.base import CausalLM
from worker.runner.greedy import GreedyChoices
from worker.runner.pending import PendingStep
from worker.runner.prepare import StepPreparer
from worker.runner.timer import Timing

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

ROWS = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, 1025, 64))
"""Uniform rows of full graphs: few enough to be captured in a second or two, dense enough that padding costs little."""
TOKENS = (8, 16, 32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024)
"""Tokens of piecewise graphs. Above, launching takes less time than the device's work."""
WHOLE_ROWS = 4
"""Most rows of whole graphs: what they save is a small part of larger steps."""
NUM_TAKES = 2
"""Of each whole graph: one is read while the next step runs."""
MANY_TOKENS = 512
"""Above, a piecewise graph's last layer computes `MAX_WANTED` tokens alone."""
MAX_WANTED = 64


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Rising."""

    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()

    @classmethod
    def up_to(cls, max_rows: int, max_tokens: int) -> "GraphSizes":
        """A step of `max_rows` uniform rows is always among them."""
        rows = tuple(size for size in ROWS if size < max_rows)
        return cls((*rows, max_rows), tuple(size for size in TOKENS if size <= max_tokens))

    def largest(self) -> "GraphSizes":
        return GraphSizes(self.rows[-1:], self.tokens[-1:])


class Outputs(NamedTuple):
    """What a forward pass leaves. Of a graph: valid until the next pass."""

    hidden: Tensor
    """[T, hidden], padding included; or [W, hidden] of the wanted tokens."""
    is_wanted_only: bool = False
    logits: "CapturedLogits | None" = None
    """Of uniform rows, if there is a graph up to them."""
    greedy: "GreedyGraph | None" = None
    """What can follow in place of logits, or behind them: see `GreedyChoices`."""


class Graph(Protocol):
    def capture_end(self) -> None: ...

    def replay(self) -> None:
        """In the current stream."""


class GraphDevice(Protocol):
    """What can record work and play it again; graphs of one device share their memory."""

    @property
    def rehearses(self) -> bool:
        """Work has to be done once before it can be recorded: kernels are compiled and libraries set up at their first
        call."""

    def recording(self) -> AbstractContextManager[None]:
        """Around a number of captures."""

    def begin(self) -> Graph:
        """Record what is launched from now on, in place of doing it, until the graph's `capture_end`."""

    def alias(self, tensor: Tensor) -> Tensor:
        """The same contiguous memory, not owned: what is captured later may use it, too."""

    def marks(self) -> Timing | None:
        """To be captured around a step; None where graphs have no marks of time."""


@dataclass(frozen=True, slots=True)
class CapturedLogits:
    logits: Tensor | None
    graph: Graph | None
    """What computes them, where the pass did not."""

    def compute(self) -> Tensor | None:
        """[R, V], padding included, valid until the next pass; None on ranks that get none."""
        if self.graph is not None:
            self.graph.replay()
        return self.logits


@dataclass(frozen=True, slots=True)
class GreedyGraph:
    graph: Graph
    token_ids: Tensor

    def choose(self) -> Tensor:
        """The tokens of all rows, padding included, int64 [R], which their slots remember: valid until the next
        pass."""
        self.graph.replay()
        return self.token_ids


@dataclass(slots=True)
class Take:
    """Of a whole graph. What it leaves is valid until its next replay."""

    graph: Graph
    timing: Timing
    token_ids: Tensor
    """On the host: int64 [R], padding included."""
    step: PendingStep | None = None
    """That it was replayed for last."""

    @property
    def is_free(self) -> bool:
        """Whether it can be replayed: nothing of the last time is still to be read."""
        return self.step is None or self.step.output is not None

    def start(self, batch: ScheduledBatch) -> PendingStep:
        rows = list(range(len(batch.slots)))
        self.step = PendingStep(batch, rows, self.timing, self.token_ids[: len(rows)])
        self.graph.replay()
        return self.step


@dataclass(frozen=True, slots=True)
class LayerCall:
    """Of a cache layer, between two graphs."""

    layer: CacheLayer
    given: Tensor
    """The layer's input, which the graph before leaves."""
    wanted: Tensor
    """Where the graph behind expects the layer's output."""


@dataclass(frozen=True, slots=True)
class FullGraph:
    max_context_len: int
    """Of the steps that it serves."""
    graph: Graph
    outputs: Outputs
    takes: Iterator[Take] | None
    """Of the whole step if it is greedy, in turns."""

    def replay(self) -> Outputs:
        self.graph.replay()
        return self.outputs


@dataclass(frozen=True, slots=True)
class PiecewiseGraph:
    graphs: list[Graph]
    calls: list[LayerCall]
    """One between each two of the graphs."""
    hidden: Tensor
    wanted: Tensor | None
    """int64 [W]: where the graph reads which tokens its result is of; None: it is of all."""

    def serves(self, wanted: Tensor | None) -> bool:
        return self.wanted is None or (wanted is not None and len(wanted) <= len(self.wanted))

    def replay(self, num_tokens: int, wanted: Tensor | None) -> Outputs:
        """In the forward context of a step of so many tokens, at most the graph's size."""
        if self.wanted is not None and wanted is not None:
            self.wanted[: len(wanted)].copy_(wanted)
            # What a larger graph was asked for last is not among this one's tokens.
            self.wanted[len(wanted) :].zero_()
        for graph, call in zip(self.graphs, self.calls, strict=False):
            graph.replay()
            call.wanted[:num_tokens].copy_(call.layer.attend(call.given[:num_tokens]))
        self.graphs[-1].replay()
        return Outputs(self.hidden, is_wanted_only=self.wanted is not None)


@dataclass(slots=True)
class Graphs:
    full: dict[int, list[FullGraph]] = field(default_factory=dict)
    """By rows; rising contexts."""
    piecewise: dict[int, PiecewiseGraph] = field(default_factory=dict)
    whole_rows: int = 0
    """Most rows of whole graphs."""


class GraphCapture:
    """Captures the passes of one model over one set of buffers and caches. Those must stay where they are."""

    def __init__(
        self,
        device: GraphDevice,
        model: CausalLM,
        builders: Sequence[CacheBuilder],
        preparer: StepPreparer,
        max_context_len: int,
        greedy: GreedyChoices,
    ) -> None:
        buffers = preparer.buffers
        self._device, self._model, self._builders, self._buffers = device, model, builders, buffers
        self._preparer, self._max_context_len = preparer, max_context_len
        self._greedy = greedy
        self._outputs: dict[int, Tensor] = {}
        """Where cache layers leave their outputs: by their size, for all layers and graphs."""
        self._wanted = torch.zeros(MAX_WANTED, dtype=torch.int64, device=buffers.input_ids.device)

    def capture(self, sizes: GraphSizes) -> Graphs:
        """The buffers hold a step of padding, which is run a few times. The largest come first, so that the smaller
        ones find their memory in the pool."""
        start = time.perf_counter()
        graphs = Graphs()
        with self._device.recording():
            for num_tokens in reversed(sizes.tokens):
                graphs.piecewise[num_tokens] = self._capture_piecewise(num_tokens)
            for rows in reversed(sizes.rows):
                contexts = graph_contexts(self._builders, rows, self._max_context_len)
                graphs.full[rows] = [self._capture_full(rows, most) for most in contexts]
                if any(full.takes is not None for full in graphs.full[rows]):
                    graphs.whole_rows = max(graphs.whole_rows, rows)
        logger.info(
            "graphs: %d full and %d piecewise captured in %.1f s",
            sum(map(len, graphs.full.values())), len(graphs.piecewise), time.perf_counter() - start,
        )  # fmt: skip
        return graphs

    def _capture_full(self, rows: int, max_context_len: int) -> FullGraph:
        # Any of the rows may be padding.
        step = Step(num_uniform_rows=rows, max_context_len=max_context_len, num_padding_rows=rows)
        staged = self._preparer.uniform_rows(rows)

        def run() -> Tensor:
            self._preparer.fill(staged, step)
            metadata = tuple(builder.prepare(step, self._buffers) for builder in self._builders)
            with forward_context(ForwardContext(metadata)):
                return self._model(self._buffers.input_ids[:rows])

        # What a graph leaves is held until those that read it are captured: they share memory.
        logits_of, greedy = self._model.logits, None
        if self._greedy.is_of_hidden(rows):
            graph, hidden = self._captured(run)
            logits_graph, logits = self._captured(lambda: logits_of(hidden))
            greedy = self._captured_choice(self._greedy.of_hidden, hidden, staged)
            captured = CapturedLogits(self._alias(logits), logits_graph)
        else:
            graph, (hidden, logits) = self._captured(lambda: (hidden := run(), logits_of(hidden)))
            if logits is not None:
                greedy = self._captured_choice(self._greedy.of_logits, logits, staged)
            captured = CapturedLogits(self._alias(logits), None)
        outputs = Outputs(self._device.alias(hidden), logits=captured, greedy=greedy)
        return FullGraph(max_context_len, graph, outputs, self._captured_takes(rows, run, staged))

    def _captured_takes(self, rows: int, run: Callable[[], Tensor], staged: StagedRows) -> Iterator[Take] | None:
        """All of it was run before: nothing has to be rehearsed."""
        choose, device = self._greedy.of_logits, self._buffers.input_ids.device
        if choose is None or rows > WHOLE_ROWS:
            return None
        takes = []
        for _ in range(NUM_TAKES):
            timing = self._device.marks()
            if timing is None:
                return None
            token_ids = torch.zeros(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
            graph = self._device.begin()
            timing.start()
            logits = self._model.logits(run())
            assert logits is not None  # of the rank that chooses
            choose(logits, staged, token_ids)
            timing.stop()
            graph.capture_end()
            takes.append(Take(graph, timing, token_ids))
        return cycle(takes)

    def _captured_choice(
        self, choose: Callable[[Tensor, StagedRows], Tensor] | None, given: Tensor, rows: StagedRows
    ) -> GreedyGraph | None:
        if choose is None:
            return None
        graph, token_ids = self._captured(lambda: choose(given, rows))
        return GreedyGraph(graph, self._device.alias(token_ids))

    def _captured(self, run: Callable[[], ResultT]) -> tuple[Graph, ResultT]:
        if self._device.rehearses:
            run()
        graph = self._device.begin()
        result = run()
        graph.capture_end()
        return graph, result

    def _alias(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else self._device.alias(tensor)

    def _capture_piecewise(self, num_tokens: int) -> PiecewiseGraph:
        input_ids = self._buffers.input_ids[:num_tokens]
        wanted = self._wanted if num_tokens > MANY_TOKENS else None
        if self._device.rehearses:
            with forward_context(ForwardContext((), self._output_of, wanted)):
                self._model(input_ids)
        graphs = [self._device.begin()]
        calls: list[LayerCall] = []

        def cut(layer: CacheLayer, x: Tensor) -> Tensor:
            graphs[-1].capture_end()
            calls.append(LayerCall(layer, self._device.alias(x), self._output_of(layer, x)))
            graphs.append(self._device.begin())
            return calls[-1].wanted

        with forward_context(ForwardContext((), cut, wanted)):
            hidden = self._model(input_ids)
        graphs[-1].capture_end()
        return PiecewiseGraph(graphs, calls, self._device.alias(hidden), wanted)

    def _output_of(self, layer: CacheLayer, x: Tensor) -> Tensor:
        """The first to ask has the most tokens."""
        if layer.output_size not in self._outputs:
            shape = (len(x), layer.output_size)
            self._outputs[layer.output_size] = torch.zeros(shape, dtype=x.dtype, device=x.device)
        return self._outputs[layer.output_size][: len(x)]


def graph_contexts(builders: Sequence[CacheBuilder], rows: int, max_context_len: int) -> list[int]:
    """What any of the builders finds worth a graph, rising; empty where one cannot be captured."""
    wanted = [builder.graph_contexts(rows, max_context_len) for builder in builders]
    return sorted({most for contexts in wanted for most in contexts}) if all(wanted) else []
