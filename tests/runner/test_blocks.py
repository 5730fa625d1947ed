"""What a batch does with blocks besides filling them: replace, copy, swap, zero. And beams, and rows that fail."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.runner.conftest import greedy_reference, make_driver, random_prompt
from tests.runner.driver import Seq, cache_of
from worker.core.batch import NewSequence

pytestmark = pytest.mark.usefixtures("inference_mode")


def greedy_after(model: LlamaForCausalLM, seq: Seq, steps: int) -> None:
    assert seq.output == greedy_reference(model, seq.tokens[: seq.num_prompt], steps)


def test_copied_block_replaces_a_shared_one(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    """Copy-on-write of the last block: the other owner may overwrite the original."""
    driver = make_driver(tiny[0])
    seq = driver.add(random_prompt(20, 1))
    driver.prefill(seq)
    old, new = seq.blocks[1], driver.free.pop()
    seq.blocks[1] = new
    driver.run([(seq, 1)], blocks_to_copy=[(old, new)], replaced_block_ids=[(seq.slot, 1, new)])
    driver.run([(seq, 1)], blocks_to_zero=[old])
    driver.decode(seq, steps=7)
    greedy_after(tiny[1], seq, 10)


def test_copies_read_before_they_write(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0])
    cache, _ = cache_of(driver.runner)
    cache.copy_(torch.arange(len(cache)).view(-1, 1, 1, 1, 1).expand_as(cache))
    driver.run([(driver.add([1]), 1)], blocks_to_copy=[(2, 4), (4, 6), (6, 2)])
    assert [int(cache[block, 0, 0, 0, 0]) for block in (2, 4, 6)] == [6, 2, 4]


def test_swap_out_and_back_into_other_blocks(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0], swap_space_gib=0.001)
    seq, other = driver.add(random_prompt(40, 2)), driver.add(random_prompt(5, 3))
    driver.prefill(seq)
    old = list(seq.blocks)
    driver.run([(other, 5)], blocks_to_swap_out=[(block, 9 - i) for i, block in enumerate(old)])
    driver.run([(other, 1)], blocks_to_zero=old)
    seq.blocks = [driver.free.pop() for _ in old]
    seq.bound = False
    driver.run([(seq, 1)], blocks_to_swap_in=[(9 - i, block) for i, block in enumerate(seq.blocks)])
    driver.decode(seq, steps=8)
    greedy_after(tiny[1], seq, 10)


def test_swap_out_goes_before_copy_and_copy_before_swap_in(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0], swap_space_gib=0.001)
    _, cache = cache_of(driver.runner)
    cache.copy_(torch.arange(len(cache)).view(-1, 1, 1, 1, 1).expand_as(cache))
    moves = {"blocks_to_swap_out": [(2, 0)], "blocks_to_copy": [(4, 2)], "blocks_to_swap_in": [(0, 4)]}
    driver.run([(driver.add([1]), 1)], **moves)
    assert [int(cache[block, 0, 0, 0, 0]) for block in (2, 4)] == [4, 2]


def test_slot_bound_anew_forgets_its_former_owner(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0])
    first = driver.add(random_prompt(50, 4))
    driver.prefill(first)
    second = driver.add(random_prompt(7, 5))
    second.slot = first.slot
    driver.prefill(second)
    driver.decode(second, steps=19)
    greedy_after(tiny[1], second, 20)


def test_table_longer_than_the_model_allows_is_refused(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0], max_model_len=32)
    seq = driver.add(random_prompt(33, 6))
    with pytest.raises(ValueError, match="3 blocks, at most 2"):
        driver.prefill(seq)


def test_garbage_in_unused_cache_entries_does_no_harm(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    """A freed block may hold the NaN of a request that failed."""
    driver = make_driver(tiny[0])
    for cache in cache_of(driver.runner):
        cache.fill_(torch.nan)
    seqs = [driver.add(random_prompt(n, n)) for n in (3, 20)]
    driver.prefill(*seqs)
    driver.decode(*seqs, steps=9)
    for seq in seqs:
        greedy_after(tiny[1], seq, 10)


def test_row_with_nan_fails_alone(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0])
    seqs = [driver.add(random_prompt(n, n)) for n in (3, 20, 9)]
    driver.prefill(*seqs)
    cache_of(driver.runner)[1][seqs[1].blocks[0], 0] = torch.nan
    driver.decode(*seqs)
    assert seqs[1].error is not None and "not finite" in seqs[1].error
    assert len(seqs[1].output) == 1
    for seq in (seqs[0], seqs[2]):
        assert seq.error is None
        greedy_after(tiny[1], seq, 2)


def test_chunk_with_nan_says_so_although_nothing_is_sampled(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0])
    seqs = [driver.add(random_prompt(n, n)) for n in (30, 31, 5)]
    driver.run([(seqs[0], 8), (seqs[1], 8)])
    cache_of(driver.runner)[0][seqs[1].blocks[0], 0] = torch.nan
    output = driver.run([(seqs[0], 8), (seqs[1], 8), (seqs[2], 5)])
    assert (list(output.errors), output.unsatisfiable_rows) == ([1], [])
    assert [len(tokens) for tokens in output.token_ids] == [0, 0, 1]


def test_beam_rows_return_the_best_tokens_with_log_probabilities(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    path, model = tiny
    driver = make_driver(path)
    plain, beam = driver.add(random_prompt(6, 1)), driver.add(random_prompt(8, 2))
    output = driver.run([(plain, 6), (beam, 8)], beam_rows=[1], num_candidates=4)
    expected = torch.log_softmax(model(torch.tensor([beam.tokens])).logits[0, -1], -1).topk(4)
    assert len(output.token_ids[0]) == 1 and output.token_ids[1] == []
    assert [token for token, _ in output.candidates[1]] == expected.indices.tolist()
    assert [score for _, score in output.candidates[1]] == pytest.approx(expected.values.tolist(), abs=1e-4)


def test_fork_by_binding_a_second_slot_to_the_same_blocks(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0])
    parent = driver.add(random_prompt(32, 3))
    driver.prefill(parent)
    child = driver.add(parent.tokens)
    child.num_prompt, child.blocks, child.num_computed = 32, list(parent.blocks), 32
    driver.decode(parent, child, steps=9)
    greedy_after(tiny[1], parent, 10)
    assert child.output == parent.output


def test_new_sequence_with_blocks_that_were_replaced_in_the_same_step(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    driver = make_driver(tiny[0])
    seq = driver.add(random_prompt(20, 8))
    batch = driver.batch([(seq, 20)])
    assert isinstance(batch.new_sequences[0], NewSequence)
    new = driver.free.pop()
    batch = batch._replace(replaced_block_ids=[(seq.slot, 0, new)])
    seq.blocks[0] = new
    driver.commit([(seq, 20)], driver.runner.execute(batch))
    driver.decode(seq, steps=4)
    greedy_after(tiny[1], seq, 5)
