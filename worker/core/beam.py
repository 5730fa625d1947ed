"""Beam search: the choice of beams as pure logic.

The algorithm and its corner cases are those of `transformers`' beam search without sampling: of all continuations of
all beams the best `num_candidates` are looked at; those that end are hypotheses if they are among the best `width`; the
best `width` that do not end are the next beams. A hypothesis' score is its log probability / length ** length_penalty.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from worker.core.outputs import Hypothesis
from worker.core.params import BeamParams, StopConditions
from worker.core.stopping import find_stop

Candidates = list[tuple[int, float]]
"""(token id, log probability), best first."""


@dataclass(frozen=True, slots=True)
class NextBeam:
    """One beam of the next step: which beam it continues, with what, and its log probability so far."""

    parent: int
    token: int
    score: float


@dataclass(slots=True)
class BeamSearch:
    """State of one search between steps: scores of the running beams, and the best `width` hypotheses so far."""

    params: BeamParams
    stop: StopConditions
    num_prompt_tokens: int
    max_length: int
    scores: list[float] = field(default_factory=lambda: [0.0])
    hypotheses: list[Hypothesis] = field(default_factory=list)
    """Best first."""

    @property
    def num_candidates(self) -> int:
        """Continuations to look at in a step: so many that `width` of them go on even if all that can end, end."""
        stop = self.stop
        num_endings = len(stop.eos_token_ids | stop.stop_token_ids) + len(stop.stop_token_sequences)
        return max(2, 1 + num_endings) * self.params.width

    def advance(self, beams: Seq[Seq[int]], candidates: list[Candidates]) -> list[NextBeam]:
        """One step: `beams` are the committed tokens of the running beams, all of one length, with their candidates.

        Returns the next beams, at most `width`; empty if the search is over and `hypotheses` has the result.
        """
        ranked = self._rank(candidates, len(beams[0]) - self.num_prompt_tokens)
        next_beams: list[NextBeam] = []
        for rank, beam in enumerate(ranked):
            _, reason = find_stop(beams[beam.parent], [beam.token], self.num_prompt_tokens, self.stop, self.max_length)
            if reason is None:
                if len(next_beams) < self.params.width:
                    next_beams.append(beam)
            elif rank < self.params.width:
                generated = [*beams[beam.parent][self.num_prompt_tokens :], beam.token]
                score = beam.score / len(generated) ** self.params.length_penalty
                self.hypotheses.append(Hypothesis(generated, score, reason))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.params.width :]
        self.scores = [beam.score for beam in next_beams]
        num_generated = len(beams[0]) + 1 - self.num_prompt_tokens
        return next_beams if self._goes_on(num_generated) else []

    def _rank(self, candidates: list[Candidates], num_generated: int) -> list[NextBeam]:
        """Before `min_tokens`, endings are left out; each beam has `width` others among its candidates."""
        stop = self.stop
        early = stop.eos_token_ids | stop.stop_token_ids if num_generated < stop.min_tokens else frozenset()
        continuations = [
            NextBeam(parent, token, self.scores[parent] + log_prob)
            for parent, of_beam in enumerate(candidates)
            for token, log_prob in of_beam
            if token not in early
        ]
        continuations.sort(key=lambda beam: -beam.score)
        return continuations[: self.num_candidates]

    def _goes_on(self, num_generated: int) -> bool:
        if not self.scores:
            return False
        if len(self.hypotheses) < self.params.width:
            return True
        best_possible = self.scores[0] / num_generated**self.params.length_penalty
        return not self.params.early_stopping and best_possible > self.hypotheses[-1].score
