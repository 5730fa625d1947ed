"""Drafters that know what the fake model says, and how often they want to be wrong."""

import random
from collections.abc import Callable

from tests.core.fake_runner import VOCABULARY, next_token
from worker.core.sequence import Sequence


def continuation(seq: Sequence, num: int) -> list[int]:
    """What the fake model says after the committed tokens of `seq`."""
    tokens = list(seq.token_ids)
    for _ in range(num):
        tokens.append(next_token(tokens, seq.sampling.seed))
    return tokens[seq.num_tokens :]


class ScriptedDrafter:
    """Of its drafts for a sequence, `num_right(step)` are right, and `num_wrong` more follow."""

    def __init__(self, num_right: Callable[[int], int], num_wrong: int = 0) -> None:
        self._num_right, self._num_wrong = num_right, num_wrong
        self.num_steps = 0
        self.asked: list[tuple[int, int]] = []
        """(sequence, most) of each call."""

    def begin_step(self) -> None:
        self.num_steps += 1

    def propose(self, seq: Sequence, most: int) -> list[int]:
        self.asked.append((seq.id, most))
        num_right = min(self._num_right(self.num_steps - 1), most)
        tokens = continuation(seq, num_right + 1)
        wrong = [(tokens[-1] + 1) % VOCABULARY] * self._num_wrong
        return [*tokens[:-1], *wrong][:most]


class RandomDrafter:
    """Any number of drafts, of which any number is right."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def begin_step(self) -> None:
        pass

    def propose(self, seq: Sequence, most: int) -> list[int]:
        num = self._random.randint(0, most)
        tokens = continuation(seq, num)
        for at in range(self._random.randint(0, num), num):
            tokens[at] = self._random.randrange(VOCABULARY)
        return tokens
