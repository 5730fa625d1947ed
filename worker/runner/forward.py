"""Phase 2 of a step, run: the forward pass over the step's buffers, replayed from a graph where one fits."""

import logging
from bisect import bisect_left
from collections.abc import Sequence

from torch import Tensor

from worker.attention.context import ForwardContext, forward_context
from worker.attention.interface import CacheBuilder
from worker.kernels.step import StagedRows, Step
from worker.models.base import CausalLM
from worker.runner.graphs import (
    FullGraph,
    GraphCapture,
    GraphDevice,
    Graphs,
    GraphSizes,
    Outputs,
    PiecewiseGraph,
    Take,
    graph_contexts,
)
from worker.runner.greedy import GreedyChoices
from worker.runner.prepare import StepPreparer

logger = logging.getLogger(__name__)


class ForwardPass:
    """Of one model over caches that are bound. Eager until `capture`."""

    def __init__(
        self, model: CausalLM, builders: Sequence[CacheBuilder], preparer: StepPreparer, max_context_len: int
    ) -> None:
        self._model, self._builders = model, builders
        self._preparer, self._buffers = preparer, preparer.buffers
        self._max_context_len = max_context_len
        self._graphs = Graphs()
        self._token_sizes: tuple[int, ...] = ()

    def capture(self, device: GraphDevice, sizes: GraphSizes, greedy: GreedyChoices) -> None:
        """Once the buffers hold a step of padding."""
        captured = GraphCapture(device, self._model, self._builders, self._preparer, self._max_context_len, greedy)
        rows = sizes.rows if graph_contexts(self._builders, 1, self._max_context_len) else ()
        self._graphs, self._token_sizes = captured.capture(GraphSizes(rows, sizes.tokens)), sizes.tokens

    @property
    def has_full_graphs(self) -> bool:
        return bool(self._graphs.full)

    @property
    def whole_rows(self) -> int:
        """Most rows that `next_take` may have something for."""
        return self._graphs.whole_rows

    def release(self) -> None:
        """Eager from now on."""
        self._graphs, self._token_sizes = Graphs(), ()

    def run(self, step: Step, rows: StagedRows, wanted: Tensor | None = None) -> Outputs:
        """From a step's rows, as the preparer has staged them. Decides how, and says why at debug level. `wanted`,
        int64 [W]: the tokens whose hidden states are read, which saves work; None: all."""
        full = self._full_graph(step)
        if full is not None:
            logger.debug("full graph of %d rows, context to %d", step.num_rows, full.max_context_len)
            return full.replay()
        self._preparer.fill(rows, step)
        metadata = tuple(builder.prepare(step, self._buffers) for builder in self._builders)
        piecewise = self._piecewise_graph(step, wanted)
        if piecewise is not None:
            logger.debug("piecewise graph for %d tokens in %d rows", step.num_tokens, step.num_rows)
            with forward_context(ForwardContext(metadata)):
                return piecewise.replay(step.num_tokens, wanted)
        logger.debug("eager: no graph for %d tokens in %d rows", step.num_tokens, step.num_rows)
        positions = self._buffers.positions[: step.num_tokens]
        with forward_context(ForwardContext(metadata, None, wanted, step.num_exchanged, positions)):
            hidden = self._model.forward(self._buffers.input_ids[: step.num_tokens])
        return Outputs(hidden, is_wanted_only=wanted is not None)

    def next_take(self, num_rows: int, max_context_len: int) -> Take | None:
        """Of a greedy step of so many uniform rows, the padding of its full graph included, if all of it is one graph:
        to be replayed at once."""
        full = self._full_graph(Step(num_uniform_rows=num_rows, max_context_len=max_context_len))
        take = None if full is None or full.takes is None else next(full.takes)
        if take is None or not take.is_free:
            return None
        logger.debug("whole graph of %d rows", num_rows)
        return take

    def _piecewise_graph(self, step: Step, wanted: Tensor | None) -> PiecewiseGraph | None:
        at = bisect_left(self._token_sizes, step.num_exchanged or step.num_tokens)
        graph = self._graphs.piecewise[self._token_sizes[at]] if at < len(self._token_sizes) else None
        return graph if graph is not None and graph.serves(wanted) else None

    def _full_graph(self, step: Step) -> FullGraph | None:
        is_alone = step.round is not None and not step.round.is_uniform
        if step.chunks or step.uniform_len > 1 or is_alone:
            return None  # ranks that step together all replay a full graph, or none does
        graphs = self._graphs.full.get(step.num_rows, ())
        return next((graph for graph in graphs if step.max_context_len <= graph.max_context_len), None)
