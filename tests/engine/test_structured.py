"""Structured output through scheduler and runner together, on a tiny model with a tokenizer of bytes."""

import json
import re

import jsonschema
import pytest
import torch

from tests.engine.conftest import MAX_MODEL_LEN
from tests.engine.loop import Loop, make_sequence
from tests.engine.ranks import Ranks
from tests.engine.reciter import Reciter
from tests.runner.byte_tokenizer import END, save_byte_model, text_of
from worker.core.config import CacheConfig, SchedulerConfig
from worker.core.model_drafter import ModelDrafter
from worker.core.params import Grammar, GrammarKind, SamplingParams, StopConditions
from worker.core.sequence import Sequence
from worker.core.stopping import FinishReason
from worker.executor.executor import Executor
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.config import RunnerConfig

NUM_BLOCKS = 64
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "bc"]},
        "sizes": {"type": "array", "items": {"enum": [1, 22]}, "maxItems": 2},
    },
    "required": ["kind", "sizes"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None},
}
GRAMMARS = [
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    Grammar(GrammarKind.REGEX, "(ab|c){3,9}[0-9]{2}"),
    Grammar(GrammarKind.CHOICE, '["yes", "no", "nobody"]'),
    Grammar(GrammarKind.EBNF, "start: pair{1,5}\npair: A B\nA: /[xyz]/\nB: /[0-9]{1,2}/"),
]
PROMPTS = [[1 + i * 7 % 250 for i in range(length)] for length in (3, 17, 33, 9)]
STOP = StopConditions(max_tokens=40, eos_token_ids=frozenset(END))


def is_match(grammar: Grammar, text: str) -> bool:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            jsonschema.validate(json.loads(text), json.loads(grammar.text))
            return True
        case GrammarKind.REGEX:
            return bool(re.fullmatch(grammar.text, text))
        case GrammarKind.CHOICE:
            return text in json.loads(grammar.text)
        case _:
            return bool(re.fullmatch("([xyz][0-9]{1,2}){1,5}", text))


def config(path, **options) -> RunnerConfig:
    defaults = {
        "model": str(path), "device": "cpu", "num_blocks": NUM_BLOCKS, "max_num_seqs": 16,
        "max_num_batched_tokens": 256, "max_model_len": MAX_MODEL_LEN, "swap_space_gib": 0.01, "num_threads": 1,
    }  # fmt: skip
    return RunnerConfig(**(defaults | options))


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny-bytes")
    save_byte_model(path)
    return path


@pytest.fixture(scope="session")
def runner(model_path):
    return build_runner(config(model_path), Group())[0]


def make_loop(runner, num_blocks=NUM_BLOCKS, drafter=None, **options) -> Loop:
    defaults = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16, "max_num_batched_tokens": 256, "watermark": 0.0}
    num_host_blocks = 32 if options.get("preemption_mode") == "swap" else 0
    return Loop(
        runner,
        SchedulerConfig(**(defaults | options)),
        CacheConfig(num_blocks=num_blocks, num_host_blocks=num_host_blocks),
        drafter,
    )


def constrained(id, seed, grammar=None, prompt=None, **more):
    sampling = SamplingParams(temperature=1.0, seed=seed, grammar=grammar or GRAMMARS[id % len(GRAMMARS)])
    return make_sequence(id, prompt or PROMPTS[id % 3], 40, sampling, **({"stop": STOP} | more))


def free(id, seed):
    return make_sequence(id, PROMPTS[id % 4], 12, SamplingParams(temperature=1.0, seed=seed))


def mixed():
    """Constrained ones of every kind, and free ones between them."""
    return [constrained(i, i) if i % 3 else free(i, i) for i in range(14)]


@pytest.fixture(scope="session")
def alone(runner):
    """What each of `mixed` gives by itself, one step after another."""
    return {seq.id: make_loop(runner, async_depth=0).run(seq)[seq.id] for seq in mixed()}


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind.value)
def test_outputs_match(runner, grammar):
    loop = make_loop(runner)
    tokens = loop.run(*(constrained(i, 100 + i, grammar) for i in range(16)))
    for id, output in loop.ended.items():
        assert output.finish_reason is FinishReason.EOS, output
        assert tokens[id][-1] in END and not END & set(tokens[id][:-1])
        assert is_match(grammar, text_of(tokens[id])), text_of(tokens[id])
    assert len({tuple(ids) for ids in tokens.values()}) > 1


def test_greedy_outputs_match(runner):
    sampling = [SamplingParams(temperature=0.0, grammar=grammar) for grammar in GRAMMARS]
    loop = make_loop(runner)
    tokens = loop.run(*(make_sequence(i, PROMPTS[i], 40, sampling[i], stop=STOP) for i in range(4)))
    assert all(is_match(grammar, text_of(tokens[i])) for i, grammar in enumerate(GRAMMARS) if tokens[i][-1] in END)
    assert tokens[2][-1] in END


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(("policy", "chunk"), [("prefill_first", 0), ("chunked", 5)])
def test_tokens_are_the_same_whatever_the_scheduler_does(runner, alone, depth, mode, policy, chunk):
    """Mixed batches in a pool that holds about a third of them; free rows are as they are alone, too."""
    loop = make_loop(
        runner, 10, async_depth=depth, preemption_mode=mode, scheduling_policy=policy, max_prefill_chunk=chunk
    )
    assert loop.run(*mixed()) == alone
    assert loop.scheduler.load().num_preemptions > 0


@pytest.mark.parametrize("num_drafts", [1, 5])
def test_drafts_right_or_wrong_change_no_token(runner, alone, num_drafts):
    """The masks behind a draft are those of the grammar's state after it; a draft that it forbids is never right."""
    loop = make_loop(runner, 10, Reciter(alone, num_drafts), async_depth=0, num_speculative_tokens=num_drafts)
    assert loop.run(*mixed()) == alone
    load = loop.scheduler.load()
    assert 0 < load.num_accepted_tokens < load.num_draft_tokens and load.num_preemptions > 0
    assert any(loop.ended[id].timings.num_accepted_tokens for id in alone if id % 3)


def test_masks_behind_drafts_that_only_the_device_knew(model_path, runner, alone):
    """A draft model knows no grammar. One that allows about half of all tokens leaves some of its drafts right."""
    wide = Grammar(GrammarKind.REGEX, "[\\x20-\\x7e]{30}")

    def sequences():
        return [*mixed(), *(constrained(id, id, wide) for id in range(20, 26))]

    plain = make_loop(runner, async_depth=0).run(*sequences())
    draft = build_runner(
        config(model_path, drafter="draft", draft_model=str(model_path), num_speculative_tokens=3), Group()
    )[0]
    loop = make_loop(draft, 12, ModelDrafter(), async_depth=0, num_speculative_tokens=3)
    assert loop.run(*sequences()) == plain == alone | {id: plain[id] for id in range(20, 26)}
    assert loop.scheduler.load().num_preemptions > 0
    counts = {id: (end.timings.num_draft_tokens, end.timings.num_accepted_tokens) for id, end in loop.ended.items()}
    assert all(0 < drafts == accepted for id, (drafts, accepted) in counts.items() if id < 20 and id % 3 == 0)
    assert all(accepted < drafts for id, (drafts, accepted) in counts.items() if id >= 20)
    assert sum(accepted for id, (_, accepted) in counts.items() if id >= 20) > 20


@pytest.mark.parametrize("depth", [0, 1])
def test_arrivals_one_a_step(runner, alone, depth):
    assert make_loop(runner, async_depth=depth).run(*mixed(), each_step=1) == alone


def test_members_of_a_group_are_what_they_are_alone(runner):
    group = [constrained(1 + i, i, GRAMMARS[0], PROMPTS[1], parent_id=1 if i else None, index=i) for i in range(4)]
    expected = [make_loop(runner).run(constrained(0, i, GRAMMARS[0], PROMPTS[1]))[0] for i in range(4)]
    tokens = make_loop(runner, async_depth=1).run(group)
    assert [tokens[1 + i] for i in range(4)] == expected


def resumed(seq, token_ids):
    """As another worker left it."""
    return Sequence(
        id=seq.id, token_ids=[*seq.token_ids, *token_ids], num_prompt_tokens=len(seq.token_ids), stop=seq.stop,
        sampling=seq.sampling,
    )  # fmt: skip


@pytest.mark.parametrize("num_resumed", [1, 4])
@pytest.mark.parametrize("depth", [0, 1])
def test_sequences_that_another_worker_began_go_on(runner, alone, depth, num_resumed):
    queue = [resumed(seq, alone[seq.id][:num_resumed]) for seq in mixed() if len(alone[seq.id]) > num_resumed]
    tokens = make_loop(runner, async_depth=depth).run(*queue)
    assert tokens == {seq.id: alone[seq.id] for seq in queue}


def test_stop_rules_end_it_before_the_grammar_does(runner):
    letters = Grammar(GrammarKind.REGEX, "[xyz]{50}")
    stops = [
        StopConditions(max_tokens=5, eos_token_ids=frozenset(END)),
        StopConditions(max_tokens=40, stop_token_ids=frozenset(b"z")),
        StopConditions(max_tokens=40, stop_token_sequences=((ord("x"), ord("y")),)),
    ]
    loop = make_loop(runner)
    tokens = loop.run(*(constrained(i, i, letters, stop=stop) for i, stop in enumerate(stops)))
    reasons = [loop.ended[i].finish_reason for i in range(3)]
    assert reasons == [FinishReason.LENGTH, FinishReason.STOP_TOKEN, FinishReason.STOP_SEQUENCE]
    texts = [text_of(tokens[i]) for i in range(3)]
    assert re.fullmatch("[xyz]{5}", texts[0])
    assert re.fullmatch("[xy]*z", texts[1])
    assert re.fullmatch("[xyz]*xy", texts[2]) and texts[2].index("xy") == len(texts[2]) - 2


@pytest.mark.parametrize("depth", [0, 1])
def test_abort_in_the_midst_leaves_the_slot_to_others(runner, alone, depth):
    """The token of the step in flight comes after the end, and the slot is bound to the next one at once."""
    loop = make_loop(runner, async_depth=depth, max_num_seqs=2)
    endless = Grammar(GrammarKind.REGEX, "[xy]{60}")
    num_steps = 0

    def before_step():
        nonlocal num_steps
        num_steps += 1
        if num_steps == 6:
            loop.scheduler.abort(100)

    tokens = loop.run(constrained(100, 1, endless), *mixed(), before_step=before_step)
    assert loop.ended[100].finish_reason is FinishReason.ABORTED
    del tokens[100]
    assert tokens == alone


@pytest.mark.parametrize("depth", [0, 1])
def test_output_that_does_not_match_ends_its_sequence_only(runner, alone, depth):
    broken = resumed(constrained(50, 1, GRAMMARS[1]), b"?")
    loop = make_loop(runner, async_depth=depth)
    tokens = loop.run(broken, *mixed())
    assert loop.ended[50].finish_reason is FinishReason.ERROR
    assert loop.ended[50].detail.startswith("structured output: ")
    assert loop.ended[50].is_request_fault
    assert tokens.pop(50) == [ord("?")]
    assert tokens == alone


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("depth", [0, 1])
def test_on_a_gpu(model_path, depth):
    """Masks go through pinned memory, and the helper waits for the event of the step before."""
    runner = build_runner(config(model_path, device="cuda"), Group())[0]
    loop = make_loop(runner, 10, async_depth=depth)
    tokens = loop.run(*mixed())
    constrained_ids = [i for i in range(14) if i % 3]
    assert all(loop.ended[i].finish_reason is FinishReason.EOS for i in constrained_ids)
    assert all(is_match(GRAMMARS[i % 4], text_of(tokens[i])) for i in constrained_ids)
    assert tokens == {seq.id: make_loop(runner, async_depth=0).run(seq)[seq.id] for seq in mixed()}


def test_two_ranks_give_the_tokens_of_one(model_path, alone):
    executor = Executor(config(model_path, tensor_parallel_size=2, num_blocks=10), log_level="warning")
    executor.start(120)
    try:
        assert executor.grammars.compile(GRAMMARS[0]).result(60) is None
        loop = make_loop(Ranks(executor), 10, async_depth=1)
        assert loop.run(*mixed()) == alone
    finally:
        executor.shutdown()
