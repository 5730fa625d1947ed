"""Requests that ask for log probabilities, and their answers."""

from fissile.v1 import (
    ChatRequest,
    GenerateRequest,
    GenerationOptions,
    SamplingParams,
)
from tests.fakes.system import collect, run_system


def ask(text="hello", *, num=1, num_prompt=None, output=None, seed=5, **options):
    sampling = SamplingParams(num_logprobs=num, num_prompt_logprobs=num_prompt, seed=seed)
    return GenerateRequest(text=text, options=GenerationOptions(sampling=sampling, output=output, **options))


def answer_to(request, worker, **settings):
    async def scenario(system):
        call = system.stub.Chat if isinstance(request, ChatRequest) else system.stub.Generate
        answer = await collect(call(request, timeout=20))
        await system.quiet()
        return answer

    return run_system(scenario, worker, **settings)


def chosen(logprobs):
    return [position.logprobs[0].token_id for position in logprobs]
