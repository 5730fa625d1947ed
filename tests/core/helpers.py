"""Small things that several core tests share, beside the builders."""

from tests.core.builders import Engine
from worker.core.batch import BatchOutput
from worker.core.outputs import SequenceOutput


def scheduled(engine: Engine) -> list[list[int]]:
    """Tokens of each row of each step so far."""
    return [batch.num_scheduled_tokens for batch in engine.batches]


def answer(engine: Engine, rows: list[list[int]]) -> list[SequenceOutput]:
    """Schedules a step, answers it with `rows` in place of a runner, and returns the news.

    For tokens that the fake model would not give, such as several accepted in one step.
    """
    batch = engine.scheduler.schedule()
    assert batch is not None
    assert len(batch.slots) == len(rows)
    engine.scheduler.postprocess(batch, BatchOutput(step=batch.step, token_ids=rows))
    engine.scheduler.check_integrity()
    return engine.scheduler.take_outputs()
