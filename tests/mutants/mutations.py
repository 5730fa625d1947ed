"""Small faults, each of a kind that was made once or nearly. The core's tests must notice every one."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutation:
    """Replaces one place of one file."""

    name: str
    file: str
    """In `worker/core`."""
    old: str
    new: str

    def apply_to(self, tree: Path, *, dry: bool = False) -> None:
        """Raises ValueError if the file has not exactly one such place: then the list is out of date."""
        path = tree / "worker" / "core" / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}, not once")
        if not dry:
            path.write_text(text.replace(self.old, self.new))


MUTATIONS = [
    # Swap.
    Mutation(
        "host blocks of a swap-in are given back within the step",
        "scheduling/admission.py",
        "builder.given_host_blocks += host_blocks",
        "self._blocks.host_pool.give(host_blocks)",
    ),
    Mutation(
        "a pending swap-out outlives the abort of its sequence",
        "scheduling/holdings.py",
        "self.swap_out = [pair for pair in self.swap_out if pair[1] not in unwanted]",
        "del unwanted",
    ),
    Mutation(
        "swapped sequences come back with a token in flight",
        "scheduling/planner.py",
        "or seq.num_in_flight_tokens or not self._admission.try_swap_in",
        "or not self._admission.try_swap_in",
    ),
    Mutation(
        "who has a row in the step may give way in it",
        "scheduling/preemption.py",
        "seq.last_step != step and ",
        "",
    ),
    # Secure mode.
    Mutation(
        "evicted blocks are not cleared", "cache/block_pool.py", "        if self._secure:\n", "        if False:\n"
    ),
    Mutation(
        "blocks are cleared again in every later step",
        "cache/block_pool.py",
        "blocks, self._to_zero = self._to_zero, []",
        "blocks = list(self._to_zero)",
    ),
    Mutation(
        "the step is not told what to clear",
        "scheduler.py",
        "builder.build(self._blocks.pool.take_blocks_to_zero(), swap_out, copies)",
        "builder.build([], swap_out, copies)",
    ),
    # Blocks in flight, copy-on-write.
    Mutation(
        "blocks of a step in flight are free at once",
        "scheduling/holdings.py",
        "if seq.last_step > self.retired_step:",
        "if seq.last_step < 0:",
    ),
    Mutation(
        "the source of a copy is free within the step",
        "scheduling/room.py",
        "builder.pinned_blocks.append(source)",
        "self._blocks.pool.give([source])",
    ),
    # Prefix cache.
    Mutation(
        "what a step in flight computes is published with its sequence gone",
        "cache/block_manager.py",
        "seq.num_computed_tokens - seq.num_in_flight_tokens",
        "seq.num_computed_tokens",
    ),
    Mutation(
        "a sequence without blocks may still be late",
        "cache/block_manager.py",
        "        seq.publish_at = NEVER\n        held",
        "        held",
    ),
    Mutation(
        "what is late is lost with its sequence",
        "cache/block_manager.py",
        "            self.publish(seq, num_proven_tokens)\n",
        "            pass\n",
    ),
    Mutation(
        "a whole prompt may be hit",
        "cache/block_manager.py",
        "(seq.num_tokens - 1) // self.block_size)",
        "seq.num_tokens // self.block_size)",
    ),
    Mutation(
        "a step of before a preemption publishes",
        "scheduling/committer.py",
        " and step.batch.step >= seq.bound_step",
        "",
    ),
    Mutation("a failed row withdraws nothing", "scheduling/committer.py", "if not is_request_fault:", "if False:"),
    Mutation("a request at fault withdraws", "scheduling/committer.py", "if not is_request_fault:", "if True:"),
    Mutation(
        "a hit is not compared",
        "cache/hash_index.py",
        " or contents_of[block] != contents[index]:",
        ":",
    ),
    Mutation("a hit may have another parent", "cache/hash_index.py", " or parents[block] != parent", ""),
    Mutation(
        "a block published anew passes for the parent it was",
        "cache/hash_index.py",
        " and self._serial_of[anchor.block_id] == anchor.serial",
        "",
    ),
    Mutation(
        "the salt is in no hash",
        "block_chain.py",
        "contents[0] += self._extra",
        "pass",
    ),
    Mutation(
        "the radix tree gives up one block too many",
        "cache/radix_index.py",
        "max(first, at + 1 - num_wanted)",
        "max(first, at - num_wanted)",
    ),
    Mutation(
        "the radix tree gives up a trunk before its leaves",
        "cache/radix_index.py",
        "            node, first, at = child, 0, 0\n",
        "            return node.blocks[at]\n",
    ),
    # Endings.
    Mutation(
        "min_tokens is one too many",
        "stopping.py",
        "num_generated >= stop.min_tokens",
        "num_generated > stop.min_tokens",
    ),
    Mutation(
        "a stop sequence may begin in the prompt",
        "stopping.py",
        "0), len(token_ids) - num_prompt_tokens)",
        "0), len(token_ids))",
    ),
    Mutation(
        "a stop sequence hides behind a longer one",
        "stop_sequences.py",
        "if not self._backwards or not backwards.startswith(self._backwards[-1]):",
        "if True:",
    ),
    Mutation(
        "known limits are overrun",
        "scheduling/planner.py",
        "if computed + 1 >= seq.max_length:",
        "if computed >= seq.max_length:",
    ),
    Mutation(
        "an ended parent leaves its group parked",
        "scheduling/state.py",
        "        self.requeue(self.groups.unpark(seq))\n",
        "",
    ),
    Mutation(
        "beams are dropped before they are forked",
        "scheduling/beam_steps.py",
        "        group.candidates.clear()\n",
        "        group.candidates.clear()\n        self._blocks.pool.give(reversed(parents[0].block_table))\n",
    ),
]
