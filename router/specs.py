"""From a request to what is asked of workers, on the version of the model that is to take it."""

from fissile.v1 import ChatRequest, DetokenizeRequest, GenerateRequest, TokenizeRequest
from router.admission.turns import LARGE_BYTES
from router.admission.worker_queue import WorkerQueue
from router.asking.bad_words import bad_token_sequences
from router.asking.checks import Limits
from router.asking.prompts import read_chat, read_prompts
from router.asking.resolve import resolve
from router.asking.spec import RequestSpec
from router.asking.validation import ContextError, validate
from router.config import RouterSettings
from router.fleet.versions import VersionChoice, Wish
from router.fleet.workers import WorkerSet
from router.model.served import ServedModel, ServedVersion


class SpecMaker:
    """Stateless. Methods raise InvalidArgumentError and FailedPreconditionError for what is wrong with a request, and
    UnimplementedError for what the model's workers do not offer."""

    def __init__(self, settings: RouterSettings, workers: WorkerSet, queue: WorkerQueue) -> None:
        self._settings = settings
        self._versions = VersionChoice(workers, settings.shares(), queue)

    async def make(
        self, request: GenerateRequest | ChatRequest, model: ServedModel, request_id: str, cache_salt: bytes
    ) -> tuple[ServedVersion, list[RequestSpec]]:
        """Validated, tokenised, with every default filled in; one for each prompt, all on one version."""
        options = request.options
        wish = Wish(
            options.dp_rank if options.HasField("dp_rank") else None,
            frozenset({"beam_search"} if options.sampling.HasField("beam_search") else ()),
            options.routing_key,
        )
        *shorter, longest = self._versions.in_order(model, wish)
        if not shorter and len(model.versions) == 1:  # nobody chooses by what is on its way
            return longest, await self._specs(request, longest, longest, request_id, cache_salt)
        for served in shorter:
            try:
                with self._versions.counted(served):
                    specs = await self._specs(request, served, longest, request_id, cache_salt)
            except ContextError:
                continue
            if all(spec.num_tokens_asked <= served.info.max_model_len for spec in specs):
                return served, specs
        with self._versions.counted(longest):
            return longest, await self._specs(request, longest, longest, request_id, cache_salt)

    async def _specs(
        self,
        request: GenerateRequest | ChatRequest,
        served: ServedVersion,
        longest: ServedVersion,
        request_id: str,
        cache_salt: bytes,
    ) -> list[RequestSpec]:
        """Raises ContextError for what another version, of which `longest` has the longest context, may take."""
        await self.validate(request, served, longest.info.max_model_len)
        limits, tokenizer = self._limits(served, served.info.max_model_len), served.tokenizer
        if isinstance(request, ChatRequest):
            prompts = [await read_chat(request, tokenizer, limits, self._settings)]
        else:
            prompts = await read_prompts(request, tokenizer, limits)
        bad = await bad_token_sequences(request.options.bad_words, tokenizer)
        return [
            resolve(
                request.options,
                served=served,
                request_id=request_id,
                prompt=prompt,
                bad_token_sequences=bad,
                cache_salt=cache_salt,
            )
            for prompt in prompts
        ]

    async def validate(
        self,
        request: GenerateRequest | ChatRequest | TokenizeRequest | DetokenizeRequest,
        served: ServedVersion,
        max_model_len: int,
    ) -> None:
        """A large request in a thread: the others are served meanwhile."""
        limits = self._limits(served, max_model_len)
        if request.ByteSize() < LARGE_BYTES:
            validate(request, limits)
        else:
            await served.tokenizer.in_thread(validate, request, limits)

    def _limits(self, served: ServedVersion, max_model_len: int) -> Limits:
        return Limits(served.info.vocab_size, max_model_len, self._settings.max_prompt_bytes, served.info.dp_size)
