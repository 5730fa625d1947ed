"""A sequence's full blocks as the prefix index sees them: content and chain hash, each computed once."""

from collections.abc import Sequence as Seq

from common.block_hash import ROOT_HASH, TOKEN_BYTES, BlockHasher, encode_salt, pack_tokens


class Anchor:
    """Where a sequence's published chain ends; only the index that made it looks inside."""

    __slots__ = ()


class BlockChain:
    """Grows with the committed tokens of one sequence; never shrinks, because committed tokens never change."""

    __slots__ = ("_block_size", "_extra", "_hasher", "contents", "hashes")

    def __init__(self, block_size: int, salt: bytes, hasher: BlockHasher) -> None:
        self._block_size = block_size
        self._extra = encode_salt(salt)
        self._hasher = hasher
        self.contents: list[bytes] = []
        """Per full block its packed tokens, followed on the first block by the encoded salt."""
        self.hashes: list[int] = []
        """Chain hashes; may be behind `contents`, see `hash_up_to`."""

    def extend(self, token_ids: Seq[int]) -> None:
        """Takes in the full blocks of all committed tokens that it does not have yet."""
        size = self._block_size
        contents = self.contents
        have = len(contents)
        full = len(token_ids) // size
        if have >= full:
            return
        packed = pack_tokens(token_ids[have * size : full * size])
        step = size * TOKEN_BYTES
        for at in range(0, len(packed), step):
            contents.append(packed[at : at + step])
        if have == 0:
            contents[0] += self._extra

    def copy(self) -> "BlockChain":
        """A chain of its own for a sequence that shares the tokens so far."""
        chain = BlockChain(self._block_size, b"", self._hasher)
        chain._extra = self._extra
        chain.contents = list(self.contents)
        chain.hashes = list(self.hashes)
        return chain

    def hash_up_to(self, num_blocks: int) -> list[int]:
        """Hashes of at least the first `num_blocks` blocks, which `contents` must have. The list stays ours."""
        hashes = self.hashes
        parent = hashes[-1] if hashes else ROOT_HASH
        hasher = self._hasher
        for content in self.contents[len(hashes) : num_blocks]:
            parent = hasher(parent.to_bytes(8, "little") + content)  # hash_block, without the call
            hashes.append(parent)
        return hashes

    def parent_hash(self, index: int) -> int:
        """Hash of the block before block `index`."""
        return self.hash_up_to(index)[index - 1] if index else ROOT_HASH
