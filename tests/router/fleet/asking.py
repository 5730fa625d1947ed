"""What the tests of lost workers ask for, and what they should get."""

from fissile.v1 import (
    FinishReason,
    GenerateRequest,
    GenerationOptions,
    OutputOptions,
    RequestOutput,
    SamplingParams,
)
from tests.fakes.worker import counts

SEED = 123
ERROR = FinishReason.FINISH_REASON_ERROR
ABORTED = FinishReason.FINISH_REASON_ABORTED


def ask(length=40, n=1):
    return GenerateRequest(
        text="hello",
        options=GenerationOptions(
            n=n, max_tokens=length, sampling=SamplingParams(seed=SEED), output=OutputOptions(token_ids=True)
        ),
    )


def refusing(code, detail="no", **fields):
    return RequestOutput(finish_reason=ERROR, error_code=code.value[0], detail=detail, **fields)


def expected(worker_sequence, length):
    return counts(length)(worker_sequence)
