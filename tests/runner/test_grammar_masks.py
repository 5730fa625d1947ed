"""Masks of steps: which rows get one, what each matcher has seen, and rows that fail alone."""

import numpy as np
import pytest
import torch

from tests.runner.byte_tokenizer import END, EOS, VOCAB_SIZE, byte_tokenizer, make_compiler, of
from worker.core.batch import DEFERRED_TOKEN, NewSequence, ScheduledBatch
from worker.core.params import Grammar, GrammarKind, SamplingParams
from worker.core.tokens import token_array
from worker.grammars import compiler as module
from worker.grammars.compiler import GrammarCompiler
from worker.grammars.masks import SlotGrammars
from worker.kernels.torch.sample import masked_copy
from worker.runner.pending import PendingStep
from worker.runner.timer import CpuTiming

PROMPT = (1, 2, 3)
EVERYTHING = set(range(32 * -(-VOCAB_SIZE // 32)))


@pytest.fixture
def grammars() -> SlotGrammars:
    return SlotGrammars(make_compiler(), VOCAB_SIZE, torch.device("cpu"), num_threads=1)


def new(slot: int, regex: str | None, output: bytes = b"") -> NewSequence:
    grammar = None if regex is None else Grammar(GrammarKind.REGEX, regex)
    return NewSequence(
        slot, token_array([*PROMPT, *output]), len(PROMPT), SamplingParams(grammar=grammar), block_ids=()
    )


def batch(*rows: tuple[int, int, list[int]], new_sequences: tuple[NewSequence, ...] = (), samples=None):
    """Rows of (slot, computed tokens, input)."""
    return ScheduledBatch(
        step=0,
        slots=[slot for slot, _, _ in rows],
        num_scheduled_tokens=[len(ids) for _, _, ids in rows],
        num_computed_tokens=[computed for _, computed, _ in rows],
        input_ids=token_array(token for _, _, ids in rows for token in ids),
        samples=samples or [True] * len(rows),
        new_sequences=list(new_sequences),
    )


def run(grammars: SlotGrammars, step: ScheduledBatch, order: list[int] | None = None, sampled: bytes = b""):
    """(allowed tokens of each sampled row, errors by batch row); None if there is no mask. `sampled` is what the
    sampler chooses."""
    rows = order if order is not None else [row for row, samples in enumerate(step.samples) if samples]
    masks = grammars.start(step, rows)
    if masks is None:
        return None
    pending = PendingStep(step, rows, CpuTiming())
    bits = masks.take(pending)
    pending.token_ids = torch.tensor(list(sampled) or [0] * len(rows))
    assert (bits.dtype, bits.shape) == (torch.int32, (len(rows), -(-VOCAB_SIZE // 32)))
    unpacked = np.unpackbits(bits.numpy().view(np.uint8), axis=1, bitorder="little")
    return [set(np.nonzero(row)[0].tolist()) for row in unpacked], pending.grammar_errors


def test_steps_without_a_grammar_get_no_mask(grammars):
    first = batch((0, 0, list(PROMPT)), (1, 0, list(PROMPT)), new_sequences=(new(0, None), new(1, "xyz")))
    assert run(grammars, batch((0, 0, list(PROMPT)), new_sequences=(new(0, None),))) is None
    assert run(grammars, first) is not None
    assert run(grammars, batch((0, 3, [9]))) is None


def test_rows_without_a_grammar_may_get_anything(grammars):
    bound = (new(0, None), new(1, "xyz"), new(2, None), new(3, "[ab]"))
    step = batch(*[(slot, 0, list(PROMPT)) for slot in range(4)], new_sequences=bound)
    assert run(grammars, step) == ([EVERYTHING, of("x"), EVERYTHING, of("a", "b")], {})


def test_masks_are_in_the_order_of_sampled_rows(grammars):
    step = batch((0, 0, list(PROMPT)), (1, 0, list(PROMPT)), new_sequences=(new(0, "x"), new(1, "y")))
    assert run(grammars, step, order=[1, 0]) == ([of("y"), of("x")], {})


def test_tokens_come_with_the_next_input(grammars):
    run(grammars, batch((5, 0, list(PROMPT)), new_sequences=(new(5, "xyz?"),)))
    assert run(grammars, batch((5, 3, [ord("x")]))) == ([of("y")], {})
    assert run(grammars, batch((5, 4, [ord("y")]))) == ([of("z") | END], {})


def test_tokens_that_the_host_does_not_know_come_from_the_step_that_sampled_them(grammars):
    bound = (new(0, "xyz?"), new(1, "ab"))
    step = batch((0, 0, list(PROMPT)), (1, 0, list(PROMPT)), new_sequences=bound)
    run(grammars, step, sampled=b"xa")
    step = batch((0, 3, [DEFERRED_TOKEN]), (1, 3, [DEFERRED_TOKEN]))
    assert run(grammars, step, sampled=b"yb") == ([of("y"), of("b")], {})
    # A row of its own in the next step: other places than before.
    assert run(grammars, batch((1, 4, [DEFERRED_TOKEN]))) == ([END], {})
    assert run(grammars, batch((0, 4, [DEFERRED_TOKEN]))) == ([of("z") | END], {})


def test_a_chunked_prompt_is_masked_where_it_ends(grammars):
    step = batch((0, 0, [1, 2]), new_sequences=(new(0, "xyz"),), samples=[False])
    assert run(grammars, step) is None
    assert run(grammars, batch((0, 2, [3]))) == ([of("x")], {})


@pytest.mark.parametrize("chunks", [1, 2])
def test_output_of_an_earlier_binding_is_seen_once(grammars, chunks):
    """After a preemption by recomputation, and on another worker: the inputs repeat what the binding holds."""
    tokens = [*PROMPT, *b"xy"]
    bound = (new(0, "xyz?", b"xy"),)
    if chunks == 2:
        assert run(grammars, batch((0, 0, tokens[:4]), new_sequences=bound, samples=[False])) is None
        step = batch((0, 4, tokens[4:]))
    else:
        step = batch((0, 0, tokens), new_sequences=bound)
    assert run(grammars, step) == ([of("z") | END], {})
    assert run(grammars, batch((0, 5, [ord("z")]))) == ([END], {})


def test_a_swapped_sequence_comes_back_with_its_last_token(grammars):
    assert run(grammars, batch((3, 3, [ord("x")]), new_sequences=(new(3, "xyz", b"x"),))) == ([of("y")], {})


def test_a_slot_that_is_bound_again_forgets(grammars):
    run(grammars, batch((0, 0, list(PROMPT)), new_sequences=(new(0, "xyz"),)), sampled=b"x")
    assert run(grammars, batch((0, 0, list(PROMPT)), new_sequences=(new(0, "y"),))) == ([of("y")], {})
    assert run(grammars, batch((0, 0, list(PROMPT)), new_sequences=(new(0, None),))) is None


def test_a_step_after_the_end_does_no_harm(grammars):
    """It was submitted before the host saw that the sequence had ended."""
    run(grammars, batch((0, 0, list(PROMPT)), new_sequences=(new(0, "x?"),)))
    assert run(grammars, batch((0, 3, [EOS]))) == ([END], {})


def test_a_token_that_does_not_match_ends_its_row_only(grammars):
    bound = (new(0, "xyz"), new(1, "ab"))
    run(grammars, batch((0, 0, list(PROMPT)), (1, 0, list(PROMPT)), new_sequences=bound))
    allowed, errors = run(grammars, batch((0, 3, [ord("q")]), (1, 3, [ord("a")])))
    assert (allowed[1], errors.keys()) == (of("b"), {0})
    assert errors[0].startswith('structured output: Parser Error: token "q" doesn\'t satisfy the grammar')
    # The next step may be on its way already.
    allowed, errors = run(grammars, batch((1, 4, [ord("b")]), (0, 4, [DEFERRED_TOKEN])))
    assert (allowed[0], errors.keys()) == (END, {1})


def test_output_of_another_worker_that_does_not_match_is_an_error(grammars):
    for step in (batch((0, 0, [*PROMPT, ord("q")]), new_sequences=(new(0, "xyz", b"q"),)), batch((0, 4, [ord("y")]))):
        _, errors = run(grammars, step)
        assert errors.keys() == {0}


def test_a_failed_draw_is_no_token(grammars):
    run(grammars, batch((0, 0, list(PROMPT)), new_sequences=(new(0, "xyz"),)))
    slot = grammars._slots[0]
    assert slot.sampled is not None
    slot.sampled[0].token_ids = torch.tensor([-1])
    _, errors = run(grammars, batch((0, 3, [DEFERRED_TOKEN])))
    assert errors == {0: "structured output: its last token could not be sampled"}


def test_a_grammar_that_was_dropped_is_compiled_again(grammars, monkeypatch):
    monkeypatch.setattr("worker.grammars.compiler.MAX_COMPILED", 1)
    for regex, letter in (("x", "x"), ("y", "y"), ("x", "x")):
        step = batch((0, 0, list(PROMPT)), new_sequences=(new(0, regex),))
        assert run(grammars, step) == ([of(letter)], {})


def test_a_grammar_that_cannot_be_compiled_ends_its_row(grammars):
    _, errors = run(grammars, batch((0, 0, list(PROMPT)), new_sequences=(new(0, "("),)))
    assert "unclosed group" in errors[0]


@pytest.mark.parametrize("vocab_size", [259, 200])
def test_tokens_without_logits_are_left_out(vocab_size):
    """The tokenizer has 260."""
    compiler = GrammarCompiler(lambda: byte_tokenizer().to_str().encode(), vocab_size, (10,))
    grammars = SlotGrammars(compiler, vocab_size, torch.device("cpu"), num_threads=1)
    step = batch((0, 0, list(PROMPT)), (1, 0, list(PROMPT)), new_sequences=(new(0, "abc?"), new(1, "b")))
    pending = PendingStep(step, [0, 1], CpuTiming())
    masks = grammars.start(step, [0, 1])
    assert masks is not None
    logits, _ = masked_copy(torch.zeros(2, vocab_size), None, 2, masks.take(pending))
    allowed = {i for i in of("a", "ab", "abc") if i < vocab_size}
    assert [set(row.isfinite().nonzero().flatten().tolist()) for row in logits] == [allowed, of("b")]


def drafted(slot: int, computed: int, known: bytes, drafts: bytes) -> ScheduledBatch:
    return batch((slot, computed, [*known, *drafts]))._replace(num_draft_tokens={0: len(drafts)})


def test_each_draft_has_a_mask_of_its_own(grammars):
    """After `x` come `y`, then `z`; behind a draft that is not allowed nothing counts, so anything may come there."""
    run(grammars, batch((0, 0, list(PROMPT)), new_sequences=(new(0, "xyzw?"),)))
    assert run(grammars, drafted(0, 3, b"x", b"yz"), order=[0, 0, 0]) == ([of("y"), of("z"), of("w") | END], {})


def test_behind_a_forbidden_draft_there_is_no_mask(grammars):
    run(grammars, batch((0, 0, list(PROMPT)), new_sequences=(new(0, "xyzw?"),)))
    assert run(grammars, drafted(0, 3, b"x", b"yy"), order=[0, 0, 0]) == ([of("y"), of("z"), EVERYTHING], {})


def test_a_mask_that_takes_too_long_behind_a_draft_is_left_to_the_next_step(monkeypatch):
    """What is unknown there allows nothing: that ends the tokens of this step, and no row."""
    monkeypatch.setattr(module, "STEP_FUEL", 10)
    grammars = SlotGrammars(make_compiler(), VOCAB_SIZE, torch.device("cpu"), num_threads=1)
    slow = new(0, "yx([a-f]+[c-z]*){2,40}|yxyz")
    assert run(grammars, batch((0, 0, list(PROMPT)), new_sequences=(slow,))) == ([of("y")], {})
    assert run(grammars, drafted(0, 3, b"y", b"x"), order=[0, 0]) == ([of("x"), set()], {})
    _, errors = run(grammars, batch((0, 4, list(b"x"))))
    assert "too many expressions" in errors[0]


@pytest.mark.parametrize(("num_new", "after"), [(1, "z"), (2, "w")])
def test_drafts_that_were_right_are_seen_with_the_next_row(grammars, num_new, after):
    """Of `y` and `z` the first, or both, came; the last of them is the next row's input, the others are computed."""
    run(grammars, batch((0, 0, list(PROMPT)), new_sequences=(new(0, "xyzw?"),)))
    step = drafted(0, 3, b"x", b"y")
    pending = PendingStep(step, [0, 0], CpuTiming(), num_new=torch.tensor([num_new]))
    masks = grammars.start(step, [0, 0])
    assert masks is not None
    masks.take(pending)
    pending.token_ids = torch.tensor(list(b"yz"))
    allowed, errors = run(grammars, batch((0, 3 + num_new, [b"yz"[num_new - 1]])))
    assert (allowed, errors) == ([of(after) | (END if num_new == 2 else set())], {})
