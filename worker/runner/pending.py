"""A step that was submitted, and what the host makes of it once the device is done."""

from dataclasses import dataclass, field

from torch import Tensor

from worker.core.batch import BatchOutput, ScheduledBatch, TokenLogprobs
from worker.kernels.sampling import FAILED
from worker.runner.timer import Timing
from worker.sampling.logprobs import LogprobTensors
from worker.sampling.row_rules import LogprobRows
from worker.sampling.sampler import NOTHING_ALLOWED

NOT_FINITE = "the model's output is not finite"
NO_TOKEN_LEFT = "sampling: allowed and banned tokens, bad sequences, min_tokens and grammar leave no token"


@dataclass(slots=True)
class PendingStep:
    """The device may still be running it. All tensors are on the host, valid when `timing` is done."""

    batch: ScheduledBatch
    sampled_rows: list[int]
    """Batch row of each of `token_ids`; those of one row stand together."""
    timing: Timing
    token_ids: Tensor | None = None
    """int64 [S], FAILED or NOTHING_ALLOWED; None when no row is sampled."""
    num_new: Tensor | None = None
    """int64, of each sampled row: how many of its tokens count, the first ones; None: all."""
    other_rows: list[int] = field(default_factory=list)
    """Batch rows that get no token."""
    others_finite: Tensor | None = None
    """bool, of each of these: whether what the model computed is finite."""
    grammar_errors: dict[int, str] = field(default_factory=dict)
    """Batch row → why its grammar can give it no token."""
    candidates: tuple[Tensor, Tensor] | None = None
    """(ids, log probabilities) of the beam rows, [beam rows, num_candidates]."""
    logprob_rows: LogprobRows | None = None
    logprobs: LogprobTensors | None = None
    """Of the sampled tokens that `logprob_rows` names."""
    prompt_rows: list[tuple[int, int, int]] | None = None
    """(batch row, number of tokens, most likely tokens it asks for)."""
    prompt_logprobs: LogprobTensors | None = None

    failure: str | None = None
    """Why no row has a result."""
    output: BatchOutput | None = None
    """Once it was asked for."""

    def new_tokens(self, index: int) -> list[int]:
        """Those that count of the row whose first one is that of `sampled_rows[index]`; the only one may be FAILED or
        NOTHING_ALLOWED. Waits for the device."""
        assert self.token_ids is not None
        self.timing.wait()
        num = 1 if self.num_new is None else int(self.num_new[len(set(self.sampled_rows[:index]))])
        return [int(token) for token in self.token_ids[index : index + num]]

    def result(self) -> BatchOutput:
        """Wait for the device, then translate. The same again when asked again."""
        if self.output is None:
            self.output = self._read()
        return self.output

    def _read(self) -> BatchOutput:
        seconds = self.timing.wait()
        if self.failure is not None:
            return self._failed(self.failure, seconds)
        unmet, broken = dict(self.grammar_errors), self._broken_other_rows()
        tokens: list[list[int]] = [[] for _ in self.batch.slots]
        for row, ids in self._sampled().items():
            if ids[0] == FAILED:
                broken.append(row)
            elif ids[0] == NOTHING_ALLOWED:
                unmet.setdefault(row, NO_TOKEN_LEFT)
            elif row not in unmet:
                tokens[row] = ids
        for row in self.batch.beam_rows:
            tokens[row] = []
        errors = unmet | dict.fromkeys(broken, NOT_FINITE)
        return BatchOutput(
            step=self.batch.step,
            token_ids=tokens,
            errors=errors,
            unsatisfiable_rows=sorted(unmet.keys() - broken),
            logprobs=self._logprobs(tokens),
            prompt_logprobs=self._prompt_logprobs(),
            candidates=self._candidates(errors),
            run_seconds=seconds,
        )

    def _failed(self, why: str, seconds: float) -> BatchOutput:
        rows = range(len(self.batch.slots))
        return BatchOutput(
            step=self.batch.step, token_ids=[[] for _ in rows], errors=dict.fromkeys(rows, why), run_seconds=seconds
        )

    def _sampled(self) -> dict[int, list[int]]:
        """Row → its tokens that count."""
        ids = [] if self.token_ids is None else self.token_ids.tolist()
        if self.num_new is None:
            return {row: [token] for row, token in zip(self.sampled_rows, ids, strict=True)}
        sampled: dict[int, list[int]] = {}
        for row, token in zip(self.sampled_rows, ids, strict=True):
            sampled.setdefault(row, []).append(token)
        counts = self.num_new.tolist()
        return {row: ids[:num] for (row, ids), num in zip(sampled.items(), counts, strict=True)}

    def _broken_other_rows(self) -> list[int]:
        if self.others_finite is None:
            return []
        finite = self.others_finite.tolist()
        return [row for row, is_finite in zip(self.other_rows, finite, strict=True) if not is_finite]

    def _logprobs(self, tokens: list[list[int]]) -> dict[int, list[TokenLogprobs]]:
        """Of the rows' new `tokens`."""
        if self.logprobs is None or self.logprob_rows is None:
            return {}
        found: dict[int, list[TokenLogprobs]] = {}
        asked = zip(self.logprob_rows.indices, self.logprob_rows.numbers, self.logprobs.to_host(), strict=True)
        for index, num, entries in asked:
            found.setdefault(self.sampled_rows[index], []).append(entries[: 1 + num])
        return {row: entries[: len(tokens[row])] for row, entries in found.items()}

    def _prompt_logprobs(self) -> dict[int, list[TokenLogprobs]]:
        if self.prompt_logprobs is None or self.prompt_rows is None:
            return {}
        entries = iter(self.prompt_logprobs.to_host())
        return {row: [next(entries)[: 1 + most] for _ in range(num)] for row, num, most in self.prompt_rows}

    def _candidates(self, errors: dict[int, str]) -> dict[int, list[tuple[int, float]]]:
        if self.candidates is None:
            return {}
        ids, scores = (tensor.tolist() for tensor in self.candidates)
        rows = zip(self.batch.beam_rows, ids, scores, strict=True)
        return {row: list(zip(*found, strict=True)) for row, *found in rows if row not in errors}
