"""Rules of sampling that requests beside each other have."""

from tests.engine.loop import GREEDY
from worker.core.params import SamplingParams

NUM_TOKENS = 16
MIX = [
    GREEDY,
    SamplingParams(seed=1, repetition_penalty=1.8),
    SamplingParams(seed=2, presence_penalty=1.5, frequency_penalty=0.7, top_k=20),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, num_logprobs=3),
    SamplingParams(seed=4, bad_token_sequences=((7,), (3, 4), (9, 8, 7)), logit_bias=((5, 3.0), (6, -3.0)), top_p=0.9),
    SamplingParams(seed=5, allowed_token_ids=tuple(range(10, 40)), banned_token_ids=(11, 12), num_logprobs=0),
    SamplingParams(seed=6, num_logprobs=200, num_prompt_logprobs=2, frequency_penalty=1.0),
]
"""The last of a test's own go behind these."""
