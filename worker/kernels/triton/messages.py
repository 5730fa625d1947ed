"""Messages between ranks: words of 32 bits that each writes into the others' inboxes.

Nobody asks, and no flag or fence is needed: a word is there once it is not `NOTHING`, and whoever has read it writes
`NOTHING` in its place, as in the Lamport protocol of NVIDIA's TensorRT-LLM. Two messages of a row can be under way: who
sends the second next one has received the next, which its sender sent after all of its programs had read the one before
and had emptied its place.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-1)
"""As a number of either width it is not one (NaN), and so is `NAN`, which is sent in its place."""
NAN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def floats_of(words, dtype: tl.constexpr, IS_HALF: tl.constexpr):
    """What is in 32 bits: one float32, twice, or two half ones."""
    if IS_HALF:
        low = (words & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        high = ((words >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        return low, high
    one = words.to(tl.float32, bitcast=True)
    return one, one


@triton.jit
def words_of(low, high, dtype: tl.constexpr, IS_HALF: tl.constexpr):
    if IS_HALF:
        low_bits = low.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        high_bits = high.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        return (low_bits | (high_bits << 16)).to(tl.int32, bitcast=True)
    return low.to(tl.int32, bitcast=True)


@triton.jit
def addresses_of(inboxes, SIZE: tl.constexpr):
    """Of each rank's inbox."""
    found = ()
    for rank in tl.static_range(SIZE):
        found += (tl.load(inboxes + rank).to(tl.pointer_type(tl.int32)),)  # type: ignore[assignment]
    return found


@triton.jit
def send(
    words, row, word, inside, turn, addresses, row_stride, RANK: tl.constexpr, SIZE: tl.constexpr,
    TO_SELF: tl.constexpr,
):  # fmt: skip
    """To all other ranks, and to itself if asked: `words` of int64 rows at the places `word`, where they are
    `inside`. `turn`: 0 or 1, one after the other."""
    place = ((row * 2 + turn) * SIZE + RANK) * row_stride + word
    message = tl.where(words == NOTHING, NAN, words)
    for rank in tl.static_range(SIZE):
        if TO_SELF or rank != RANK:
            tl.store(addresses[rank] + place, message, mask=inside, cache_modifier=".wt")


@triton.jit
def wait_for_word(message):
    """For the first one. Whoever waits for long asks for no more than that, and leaves the memory to those who compute
    what is waited for."""
    while tl.load(message, volatile=True) == NOTHING:
        pass


@triton.jit
def ask(message, word, inside):
    return tl.load(message + word, mask=inside, other=0, volatile=True)


@triton.jit
def complete(found, message, word, inside):
    """All words of a message, whose place is then empty; `found`: what `ask` did."""
    while tl.sum((found == NOTHING).to(tl.int32)) > 0:
        found = ask(message, word, inside)
    tl.store(message + word, tl.full(word.shape, NOTHING, tl.int32), mask=inside)
    return found
