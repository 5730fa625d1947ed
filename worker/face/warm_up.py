"""A worker's first request, its own."""

from fissile import v1
from worker.errors import WorkerFailedError
from worker.face.broker import Broker
from worker.face.convert_group import ModelLimits

NUM_TOKENS = 16
"""Of its prompt."""


async def warm_up(broker: Broker, limits: ModelLimits, step_timeout: float) -> None:
    """The way routers' requests go: SERVING must mean that the next one succeeds. Raises WorkerFailedError."""
    num_tokens = min(NUM_TOKENS, limits.max_model_len - 1)
    group = v1.SequenceGroup(
        request_id="warm-up",
        prompt_token_ids=[0] * num_tokens,
        sequences=[v1.Sequence(id=1)],
        max_tokens=min(2, limits.max_tokens_left(num_tokens, 1)),
        ignore_eos=True,
        cache_salt=b"warm-up",
    )
    stream = broker.open_stream()
    broker.handle(stream, v1.ExecuteCommand(group=group))
    stream.half_close()
    try:
        while not stream.is_over:
            response = await stream.next(step_timeout)
            for output in response.outputs if response else ():
                if output.finish_reason == v1.FINISH_REASON_ERROR:
                    raise WorkerFailedError(f"the first request failed: {output.detail}")
    finally:
        broker.close_stream(stream)
