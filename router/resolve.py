"""From a validated request to what is asked of workers: defaults filled in, seed drawn."""

import secrets

from common.errors import InvalidArgumentError, UnimplementedError
from fissile.v1 import GenerationOptions, SamplingParams
from router.completion import TextRules
from router.spec import RequestSpec
from router.tokenizer import Tokenizer
from router.workers import ServedModel

MAX_FANOUT_TOKENS = 8 * 1024 * 1024
"""Prompt tokens × n of one request: they travel in one message."""


def default_sampling(tokenizer: Tokenizer) -> SamplingParams:
    """What the model's generation_config.json recommends, then our defaults. Without seed."""
    config = tokenizer.generation_config
    values = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    for name in ("temperature", "top_p", "min_p"):
        value = config.get(name)
        if isinstance(value, int | float):
            setattr(values, name, value)
    top_k = config.get("top_k")
    if isinstance(top_k, int):
        values.top_k = top_k
    return values


def resolve(options: GenerationOptions, *, model: ServedModel, prompt: list[int], request_id: str) -> RequestSpec:
    output = options.output
    n = options.n if options.HasField("n") else 1
    if n * len(prompt) > MAX_FANOUT_TOKENS:
        raise InvalidArgumentError.of("options.n", f"n × prompt tokens must not exceed {MAX_FANOUT_TOKENS}")
    room = model.info.max_model_len - len(prompt)
    special_stops = {i: stop for stop in options.stop if (i := model.tokenizer.special_token_id(stop)) is not None}
    return RequestSpec(
        request_id=request_id,
        model=model.id,
        tokenizer_fingerprint=model.tokenizer.fingerprint,
        prompt=prompt,
        n=n,
        sampling=_sampling(options, model),
        max_tokens=options.max_tokens if options.HasField("max_tokens") else room,
        text=TextRules(
            send_text=output.text if output.HasField("text") else True,
            send_token_ids=output.token_ids,
            send_logprobs=options.sampling.HasField("num_logprobs"),
            stops=tuple(options.stop),
            special_stops=special_stops,
            include_stop=options.include_stop,
            min_tokens=options.min_tokens,
        ),
        stop_token_ids=sorted({*options.stop_token_ids, *special_stops}),
        stop_token_sequences=options.stop_token_sequences,
        ignore_eos=options.ignore_eos,
        skip_special_tokens=options.skip_special_tokens if options.HasField("skip_special_tokens") else True,
        priority=options.priority,
        cache_salt=options.cache_salt,
        dp_rank=options.dp_rank if options.HasField("dp_rank") else None,
        send_prompt=output.prompt_token_ids,
        cumulative=output.cumulative,
        final_only=output.final_only,
        heartbeat=output.heartbeat.ToNanoseconds() / 1e9 if output.HasField("heartbeat") else None,
    )


def _sampling(options: GenerationOptions, model: ServedModel) -> SamplingParams:
    if options.sampling.HasField("beam_search") and "beam_search" not in model.info.capabilities:
        raise UnimplementedError(f"options.sampling.beam_search: the workers of {model.id} do not offer it")
    sampling = default_sampling(model.tokenizer)
    sampling.MergeFrom(options.sampling)
    sampling.top_k = max(0, sampling.top_k)
    for name in ("num_logprobs", "num_prompt_logprobs"):
        if sampling.HasField(name):
            setattr(sampling, name, min(getattr(sampling, name), model.info.vocab_size))
    if not sampling.HasField("seed"):
        sampling.seed = secrets.randbits(64)
    return sampling
