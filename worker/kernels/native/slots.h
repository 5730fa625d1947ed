// From the slots' state to a step's buffers, and back: what sequences are, and what became of them.
#pragma once

#include <algorithm>

#include "vector.h"

// The structs are shared with Python (library.py), field by field; worker/kernels/step.py says what is in them.
struct Slots {
    int32_t *tokens;
    int64_t *lengths;
    const int32_t *block_tables;
    const int64_t *groups;
    int64_t most_tokens, most_blocks, spare_slot;
};

struct StagedRows {
    const int64_t *slots, *starts, *lens;
    int32_t num_rows, num_uniform_rows, num_padding_rows, block_size, table_width;
};

struct Buffers {
    int64_t *input_ids, *positions, *token_slots;
    int32_t *query_starts, *context_lens;
    int64_t *next_positions;
    int32_t *block_tables;
    int64_t *groups;
    int64_t most_blocks;
};

static inline void prepare_row(const StagedRows &rows, const Slots &slots, const Buffers &out, int row) {
    const int64_t slot = rows.slots[row], len = rows.lens[row];
    const int64_t start = row < rows.num_uniform_rows ? slots.lengths[slot] - 1 : rows.starts[row];
    const bool is_padding = rows.num_padding_rows > 0 && slot == slots.spare_slot;
    const int32_t *tokens = slots.tokens + slot * slots.most_tokens;
    const int32_t *blocks = slots.block_tables + slot * slots.most_blocks;
    const int first = out.query_starts[row];
    for (int64_t i = 0; i < len; i++) {
        const int64_t position = start + i;
        const int64_t block = blocks[position / rows.block_size];
        out.positions[first + i] = position;
        out.input_ids[first + i] = tokens[position];
        out.token_slots[first + i] = is_padding ? -1 : block * rows.block_size + position % rows.block_size;
    }
    out.query_starts[row + 1] = int32_t(first + len);
    out.next_positions[row] = is_padding ? 0 : start + len;
    out.context_lens[row] = int32_t(out.next_positions[row]);
    std::copy_n(blocks, rows.table_width, out.block_tables + row * out.most_blocks);
    out.groups[row] = slots.groups[slot];
}
