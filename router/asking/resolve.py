"""From a validated request to what is asked of workers: defaults filled in, seed drawn."""

import secrets
from collections.abc import Sequence
from typing import Final

from common import bounds
from fissile.errors import InvalidArgumentError, UnimplementedError
from fissile.v1 import GenerationOptions, SamplingParams, TokenSequence
from router.asking.spec import Prompt, RequestSpec, TextRules
from router.model.served import ServedVersion

_TOKEN_RULES: Final = ("logit_bias", "banned_token_ids", "bad_token_sequences")


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
    own, output = options.sampling, options.output
    n = options.n if options.HasField("n") else 1
    if n * len(prompt.token_ids) > bounds.MAX_FANOUT_TOKENS:
        raise InvalidArgumentError.of("options.n", f"n × prompt tokens must not exceed {bounds.MAX_FANOUT_TOKENS}")
    text = _text_rules(options, served, prompt)
    return RequestSpec(
        request_id=request_id,
        model=served.model,
        version=served.version,
        prompt=prompt,
        n=n,
        sampling=_sampling(options, served, bad_token_sequences, prompt),
        seed=own.seed if own.HasField("seed") else secrets.randbits(64),
        max_tokens=options.max_tokens if options.HasField("max_tokens") else None,
        text=text,
        stop_token_ids=sorted({*options.stop_token_ids, *text.special_stops}),
        stop_token_sequences=options.stop_token_sequences,
        ignore_eos=options.ignore_eos,
        skip_special_tokens=_skips_special_tokens(options),
        priority=options.priority,
        cache_salt=cache_salt,
        routing_key=options.routing_key,
        dp_rank=options.dp_rank if options.HasField("dp_rank") else None,
        send_prompt=output.prompt_token_ids,
        cumulative=output.cumulative,
        final_only=output.final_only,
        heartbeat=output.heartbeat.ToNanoseconds() / 1e9 if output.HasField("heartbeat") else None,
    )


def _text_rules(options: GenerationOptions, served: ServedVersion, prompt: Prompt) -> TextRules:
    own, output = options.sampling, options.output
    is_free = not (prompt.grammar or own.HasField("structured_output"))
    is_beam_search = own.HasField("beam_search")
    stops = tuple(options.stop) or (served.tokenizer.defaults.stop if is_free and not is_beam_search else ())
    # As with bad words: what is a token that the model does not have never comes.
    special = ((served.tokenizer.special_token_id(stop), stop) for stop in stops)
    return TextRules(
        send_text=output.text if output.HasField("text") else True,
        send_token_ids=output.token_ids,
        send_logprobs=own.HasField("num_logprobs"),
        stops=stops,
        special_stops={i: stop for i, stop in special if i is not None and i < served.info.vocab_size},
        include_stop=options.include_stop,
        min_tokens=_min_tokens(options, served, prompt) if is_free else options.min_tokens,
        # Who wants to see special tokens wants the text as the model wrote it.
        reading=prompt.reading if _skips_special_tokens(options) else None,
    )


def _skips_special_tokens(options: GenerationOptions) -> bool:
    return options.skip_special_tokens if options.HasField("skip_special_tokens") else True


def _sampling(
    options: GenerationOptions, served: ServedVersion, bad: Sequence[TokenSequence], prompt: Prompt
) -> SamplingParams:
    if options.sampling.HasField("beam_search") and "beam_search" not in served.version.capabilities:
        raise UnimplementedError(f"options.sampling.beam_search: the workers of {served.model} do not offer it")
    sampling = _recommended(options, served, prompt)
    sampling.MergeFrom(options.sampling)
    if prompt.grammar:
        sampling.structured_output.CopyFrom(prompt.grammar.constraint)
    # What has a token that the model does not have never comes.
    if bad:
        sampling.bad_token_sequences.extend(s for s in bad if max(s.token_ids) < served.info.vocab_size)
    sampling.top_k = max(0, sampling.top_k)
    for name in ("num_logprobs", "num_prompt_logprobs"):
        if sampling.HasField(name):
            setattr(sampling, name, min(getattr(sampling, name), served.info.vocab_size))
    sampling.ClearField("seed")
    return sampling


def _recommended(options: GenerationOptions, served: ServedVersion, prompt: Prompt) -> SamplingParams:
    """What holds where the request does not say otherwise. A list of the request's own stands in place of the
    model's."""
    own, defaults, sampling = options.sampling, served.tokenizer.defaults.sampling, SamplingParams()
    sampling.CopyFrom(defaults)
    has_lists = defaults.logit_bias or defaults.banned_token_ids or defaults.bad_token_sequences
    if not has_lists and not own.HasField("beam_search"):
        return sampling  # as with most models
    for name in _TOKEN_RULES:
        sampling.ClearField(name)
    if own.HasField("beam_search"):
        for name in bounds.NEUTRAL_TO_BEAMS:
            sampling.ClearField(name)
        return sampling
    size, endings = served.info.vocab_size, served.info.eos_token_ids
    if not own.logit_bias:
        sampling.logit_bias.extend(bias for bias in defaults.logit_bias if bias.token_id < size)
    if own.allowed_token_ids or own.HasField("structured_output") or prompt.grammar:
        return sampling  # with bans of the model's no token might be left
    if not own.banned_token_ids:
        sampling.banned_token_ids.extend(i for i in defaults.banned_token_ids if i < size)
    if not (own.bad_token_sequences or options.bad_words):
        # As in `transformers`, no ending token is a bad word.
        sampling.bad_token_sequences.extend(
            bad for bad in defaults.bad_token_sequences
            if max(bad.token_ids) < size and not (len(bad.token_ids) == 1 and bad.token_ids[0] in endings)
        )  # fmt: skip
    return sampling


def _min_tokens(options: GenerationOptions, served: ServedVersion, prompt: Prompt) -> int:
    """The model's own number keeps no request from ending where it must."""
    if options.HasField("min_tokens"):
        return options.min_tokens
    most = options.max_tokens if options.HasField("max_tokens") else served.info.max_model_len - len(prompt.token_ids)
    return max(0, min(served.tokenizer.defaults.min_tokens, most))
