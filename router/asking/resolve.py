"""From a validated request to what is asked of workers: defaults filled in, seed drawn."""

import secrets
from collections.abc import Sequence
from typing import Final

from common import bounds
from fissile.errors import InvalidArgumentError, UnimplementedError
from fissile.v1 import GenerationOptions, SamplingParams, TokenSequence
from router.asking.spec import Prompt, RequestSpec, TextRules
from router.model.served import ServedVersion

_PENALTIES: Final = ("presence_penalty", "frequency_penalty", "repetition_penalty")
"""Beam search has none, whatever the model recommends."""


def resolve(
    options: GenerationOptions,
    *,
    served: ServedVersion,
    request_id: str,
    prompt: Prompt,
    bad_token_sequences: Sequence[TokenSequence],
    cache_salt: bytes,
) -> RequestSpec:
    """`bad_token_sequences`: those of `bad_words`; they join those that the request has itself. `cache_salt` stands in
    place of the request's own."""
    output = options.output
    n = options.n if options.HasField("n") else 1
    if n * len(prompt.token_ids) > bounds.MAX_FANOUT_TOKENS:
        raise InvalidArgumentError.of("options.n", f"n × prompt tokens must not exceed {bounds.MAX_FANOUT_TOKENS}")
    skip_special_tokens = options.skip_special_tokens if options.HasField("skip_special_tokens") else True
    # As with bad words: what is a token that the model does not have never comes.
    special = ((served.tokenizer.special_token_id(stop), stop) for stop in options.stop)
    special_stops = {i: stop for i, stop in special if i is not None and i < served.info.vocab_size}
    return RequestSpec(
        request_id=request_id,
        model=served.model,
        version=served.version,
        prompt=prompt,
        n=n,
        sampling=_sampling(options, served, bad_token_sequences, prompt),
        max_tokens=options.max_tokens if options.HasField("max_tokens") else None,
        text=TextRules(
            send_text=output.text if output.HasField("text") else True,
            send_token_ids=output.token_ids,
            send_logprobs=options.sampling.HasField("num_logprobs"),
            stops=tuple(options.stop),
            special_stops=special_stops,
            include_stop=options.include_stop,
            min_tokens=options.min_tokens,
            # Who wants to see special tokens wants the text as the model wrote it.
            reading=prompt.reading if skip_special_tokens else None,
        ),
        stop_token_ids=sorted({*options.stop_token_ids, *special_stops}),
        stop_token_sequences=options.stop_token_sequences,
        ignore_eos=options.ignore_eos,
        skip_special_tokens=skip_special_tokens,
        priority=options.priority,
        cache_salt=cache_salt,
        routing_key=options.routing_key,
        dp_rank=options.dp_rank if options.HasField("dp_rank") else None,
        send_prompt=output.prompt_token_ids,
        cumulative=output.cumulative,
        final_only=output.final_only,
        heartbeat=output.heartbeat.ToNanoseconds() / 1e9 if output.HasField("heartbeat") else None,
    )


def _sampling(
    options: GenerationOptions, served: ServedVersion, bad: Sequence[TokenSequence], prompt: Prompt
) -> SamplingParams:
    if options.sampling.HasField("beam_search") and "beam_search" not in served.version.capabilities:
        raise UnimplementedError(f"options.sampling.beam_search: the workers of {served.model} do not offer it")
    sampling = SamplingParams()
    sampling.CopyFrom(served.tokenizer.default_sampling)
    sampling.MergeFrom(options.sampling)
    if prompt.grammar:
        sampling.structured_output.CopyFrom(prompt.grammar.constraint)
    # What has a token that the model does not have never comes.
    sampling.bad_token_sequences.extend(s for s in bad if max(s.token_ids) < served.info.vocab_size)
    sampling.top_k = max(0, sampling.top_k)
    for name in ("num_logprobs", "num_prompt_logprobs"):
        if sampling.HasField(name):
            setattr(sampling, name, min(getattr(sampling, name), served.info.vocab_size))
    if not sampling.HasField("seed"):
        sampling.seed = secrets.randbits(64)
    if sampling.HasField("beam_search"):
        for name in _PENALTIES:
            sampling.ClearField(name)
    return sampling
