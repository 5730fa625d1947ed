"""A drafter that knows what will come, or gets it wrong."""

import random

from worker.core.sequence import Sequence


class Reciter:
    """Knows what each sequence will say, and is wrong now and then."""

    def __init__(self, tokens: dict[int, list[int]], seed: int) -> None:
        self._tokens, self._random = tokens, random.Random(seed)

    def begin_step(self) -> None:
        pass

    def propose(self, seq: Sequence, most: int) -> list[int]:
        at = seq.num_generated_tokens
        drafts = self._tokens[seq.id][at : at + self._random.randint(0, most)]
        return [token if self._random.random() < 0.8 else (token + 1) % 128 for token in drafts]
