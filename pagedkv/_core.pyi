"""Block structures of pagedkv: allocator, tables, sequences. Needs neither torch nor a GPU."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

class OutOfMemoryError(MemoryError):
    """Too few cache blocks are free. The call that raised it changed nothing."""

class BlockAllocator:
    """A pool of equally sized cache blocks with reference counts."""

    def __init__(self, num_blocks: int, block_size: int) -> None: ...
    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
    @property
    def block_size(self) -> int:
        """Tokens in a block."""
    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out."""
    @property
    def peak_used_blocks(self) -> int:
        """The most blocks that were in use at one time."""
    @property
    def free_blocks(self) -> list[int]:
        """Free ids as they will be handed out: most recently freed first, then unused ones ascending."""
    @property
    def block_ref_count(self) -> list[int]:
        """One count per block: the tables that own it and the pending copies that read it; 0 is free."""
    def allocate(self) -> int:
        """Take one block; OutOfMemoryError where none is free."""
    def allocate_many(self, n: int) -> list[int]:
        """Take n blocks, or none: OutOfMemoryError where fewer are free, ValueError where n is negative."""
    def allocate_array(self, n: int) -> npt.NDArray[np.int32]:
        """Take n blocks as `allocate_many` does, as an array."""
    def free(self, block: int) -> None:
        """Give up one reference; ValueError where the block is already free or outside the pool."""
    def free_many(self, blocks: Iterable[int] | npt.NDArray[np.integer]) -> None:
        """Give up one reference per entry, or none: ValueError where one of them is not to be had."""
    def incr_ref(self, block: int) -> None:
        """Add a reference to a block that is in use; ValueError where it is free or outside the pool."""
    def check_integrity(self) -> None:
        """Recount everything; RuntimeError names a broken invariant."""

class BlockTable:
    """The blocks of one sequence, with copy-on-write of blocks shared between forks."""

    def __init__(self, block_size: int | None = None, allocator: BlockAllocator | None = None) -> None: ...
    @property
    def num_tokens(self) -> int:
        """Tokens the table has slots for."""
    @property
    def num_blocks(self) -> int:
        """ceil(num_tokens / block_size)."""
    @property
    def block_size(self) -> int:
        """Tokens in a block."""
    @property
    def physical_blocks(self) -> list[int]:
        """Physical ids in logical order."""
    @property
    def logical_to_physical(self) -> dict[int, int]:
        """{logical id: physical id}."""
    def allocate(self, num_tokens: int) -> list[int]:
        """Make room for num_tokens more tokens; the physical ids of the new logical blocks."""
    def get_physical_block(self, logical_block_id: int) -> int:
        """The physical id of a logical block; IndexError where the table has no such block."""
    def slot_mapping(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """[stop - start] cache slots of these tokens; IndexError outside 0 <= start <= stop <= num_tokens."""
    def fork(self) -> BlockTable:
        """A table of the same tokens that shares every block with this one."""
    def take_pending_copies(self) -> list[tuple[int, int]]:
        """(source, destination) pairs due before the next write; each is handed out once."""
    def truncate(self, num_tokens: int) -> None:
        """Forget the tokens from num_tokens on; ValueError above the table's."""
    def free(self) -> None:
        """Give back every block; a second call does nothing."""

class Batch:
    """A batch that was opened: what `Sequences.open_batch` returns, as numpy arrays."""

    @property
    def batch_id(self) -> int: ...
    @property
    def max_query_len(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def block_tables(self) -> npt.NDArray[np.int32]:
        """[num_groups, num_seqs, max_blocks], rows padded with -1."""
    @property
    def context_lens(self) -> npt.NDArray[np.int32]:
        """[num_seqs]."""
    @property
    def query_start_loc(self) -> npt.NDArray[np.int32]:
        """[num_seqs + 1]."""
    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """[num_groups, num_tokens]."""
    @property
    def copies(self) -> npt.NDArray[np.int64]:
        """[num_pairs, 2], to be run before the batch is written."""

class BatchBuffers:
    """Arrays that `Sequences.open_batch` writes batches to; rows that have only grown are only added to."""

    def __init__(self, num_groups: int, max_seqs: int, max_blocks: int, max_tokens: int) -> None: ...
    @property
    def block_tables(self) -> npt.NDArray[np.int32]:
        """[num_groups, max_seqs, max_blocks]."""
    @property
    def context_lens(self) -> npt.NDArray[np.int32]:
        """[max_seqs]."""
    @property
    def query_start_loc(self) -> npt.NDArray[np.int32]:
        """[max_seqs + 1]."""
    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """[num_groups, max_tokens]."""

class Counts:
    """What `Sequences.counts` returns: numbers of one moment."""

    num_used: int
    num_cached: int
    num_filled_slots: int
    peak_used: int
    num_evictions: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_host_used: int
    num_host_cached: int
    num_host_hits: int

class Sequences:
    """The sequences of one cache and the allocator they share, in terms of ids."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: Sequence[int] = (0,),
        num_host_blocks: int = 0,
        max_used_blocks: int | None = None,
        max_tokens_per_seq: int | None = None,
        compare_tokens: bool = False,
        key_bits: int = 256,
    ) -> None: ...
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_cached_blocks(self) -> int:
        """Blocks that only the prefix cache keeps; they count as free too."""
    def counts(self) -> Counts:
        """Count blocks, filled slots and hits; O(num_blocks)."""
    def add(
        self,
        token_ids: Iterable[int] | npt.NDArray[np.integer] | None = None,
        num_tokens: int = 0,
        root: bytes | None = None,
    ) -> int:
        """A new sequence of these tokens, or of num_tokens unnamed ones; a root has it reuse a prefix."""
    def append_ids(self, id: int, token_ids: Iterable[int] | npt.NDArray[np.integer]) -> None:
        """More known tokens."""
    def append_count(self, id: int, num_tokens: int) -> None:
        """More known tokens, unnamed."""
    def append_each(
        self,
        ids: Iterable[int] | npt.NDArray[np.integer],
        token_ids: Iterable[int] | npt.NDArray[np.integer] | None = None,
    ) -> None:
        """One more token for each, unnamed without ids."""
    def fork(self, id: int) -> int:
        """A sequence with the same tokens that shares every block."""
    def reorder(self, ids: Iterable[int], parents: Iterable[int] | npt.NDArray[np.integer]) -> None:
        """ids[i] becomes what ids[parents[i]] was."""
    def truncate(self, id: int, num_tokens: int) -> None:
        """Forget the tokens behind."""
    def free(self, id: int) -> int:
        """Give the blocks back; the open batch that became stale by it, or -1."""
    def is_live(self, id: int) -> bool: ...
    def num_tokens(self, id: int) -> int: ...
    def num_computed_tokens(self, id: int) -> int: ...
    def num_shared_tokens(self, id: int) -> int:
        """Leading tokens up to the last whose block others own too."""
    def num_cached_tokens(self, id: int) -> int:
        """Tokens that were found computed when the sequence was added."""
    def token_ids(self, id: int) -> list[int]:
        """Ids of the leading tokens, as far as they were given."""
    def blocks(self, id: int, group: int = 0) -> list[int]:
        """Physical ids in logical order."""
    def open_batch(
        self,
        ids: Iterable[int],
        query_lens: Iterable[int] | npt.NDArray[np.integer] | None = None,
        buffers: BatchBuffers | None = None,
    ) -> Batch:
        """Take the blocks of the next query_lens[i] uncomputed tokens (None: all) of each, all or nothing."""
    def commit(self, batch_id: int) -> None:
        """Count the batch's tokens as computed."""
    def abandon(self, batch_id: int) -> None:
        """Give back the blocks that the batch took."""
    def can_append(self, ids: Iterable[int], counts: Iterable[int] | npt.NDArray[np.integer]) -> bool:
        """Whether a batch of all uncomputed tokens and counts[i] more would find its blocks."""
    def can_allocate(self, num_tokens: int, num_spare: int = 0) -> bool:
        """Whether a batch of a new sequence would find its blocks, num_spare left over."""
    def can_allocate_ids(
        self, token_ids: Iterable[int] | npt.NDArray[np.integer], root: bytes, num_spare: int = 0
    ) -> bool:
        """The same, with the blocks that it would find in the prefix cache."""
    def probe(self, token_ids: Iterable[int] | npt.NDArray[np.integer], root: bytes) -> int:
        """The tokens that a sequence of these ids would find computed."""
    def evict(self, count: int) -> int:
        """Free the least recently used blocks that only the prefix cache keeps; how many."""
    def reset_prefix_cache(self) -> None:
        """Forget all prefixes; ValueError while a sequence has blocks."""
    @property
    def num_free_host_blocks(self) -> int: ...
    def swap_out(self, id: int) -> tuple[int, npt.NDArray[np.int64]]:
        """Move a sequence to host blocks; a transfer and its copies, [num_pairs, 2], for the caller."""
    def swap_in(self, id: int) -> tuple[int, npt.NDArray[np.int64]]:
        """Move it back."""
    def swap_out_prefixes(self, count: int) -> tuple[int, int, npt.NDArray[np.int64]]:
        """Move the blocks that `evict` would free to the host; how many, a transfer and its copies."""
    def take_arrivals(self) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """What `add` has brought back from the host since the last call: transfers and their copies."""
    def finish_transfer(self, transfer_id: int) -> None:
        """The copies have run: the blocks that they read may be handed out."""
    def is_swapped_out(self, id: int) -> bool: ...
    def can_swap_in(self, id: int) -> bool:
        """Whether the sequence, and then a batch of all its tokens or one more, would find its blocks."""
    def usage(
        self,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Per block: owners, filled slots, a label of the first sequence that maps it (-1: none), cached."""
    def check_integrity(self) -> None:
        """Recount everything; RuntimeError names what is broken."""

def sha256_is_native() -> bool:
    """Whether the CPU has instructions for SHA-256."""

def sha256_compress(state: bytes, chunks: bytes, native: bool) -> bytes:
    """The SHA-256 compression function: the 32-byte state after some chunks of 64 bytes."""

def extend_key(parent: bytes, token_ids: Iterable[int] | npt.NDArray[np.integer]) -> bytes:
    """The key of a block of these tokens, behind the blocks (or the root) whose key is `parent`."""
