// The weights of linear layers, packed into panels of PANEL outputs each, and the tiles of sums over one panel.
//
// A panel is what one chunk of work reads, from its beginning to its end. An output's sum is taken in the order of the
// inputs, in one chain, whatever the number of rows: a row comes out the same alone and in any batch.
#pragma once

#include "unpacked.h"
#include "vector.h"

constexpr int PANEL = 2 * W;

static inline int num_panels(const Matrix &matrix) { return (matrix.out + PANEL - 1) / PANEL; }

static inline size_t panel_bytes(const Matrix &matrix) {
    if (matrix.bits == 32) return size_t(matrix.in) * PANEL * sizeof(float);
    return 2 * strip_bytes(matrix);
}

// Of a row that it reads: floats, or whole numbers with their scales and sums.
static inline int row_bytes(const Matrix &matrix) {
    return matrix.bits == 32 ? matrix.in * 4 : matrix.in + matrix.in / ROW_BLOCK * 8;
}

// What a norm multiplies each row by, still to be found: the inverse root of its mean square. The squares have been
// summed up panel by panel, as a product made the rows.
struct Shares {
    float *squares;  // [panels][rows]; null: there is no norm, or the rows have it already
    int num_panels, num_rows;
    int size;  // of a row
    float eps;

    // Of rows first ... last; `out` has room for whole vectors.
    void find(int first, int last, float *out) const {
        for (int row = first; row < last; row += W, out += W) {
            Vec total = {};
            for (int panel = 0; panel < num_panels; panel++) total += load(squares + size_t(panel) * num_rows + row);
            store(out, squares == nullptr ? splat(1.0f) : 1.0f / root_of(total / float(size) + eps));
        }
    }
};

// Rows of activations as a product reads them: floats, and beside them whole numbers where its matrix has blocks.
struct Rows {
    const float *values;
    size_t stride;
    QuantizedRows quantized;
    Shares shares = {};
};

// One of the tiles that go over a panel, one after the other.
struct Pass {
    int number, total;
    int next;  // how many panels further on the thread goes, probably, after the last of them
    PieceFetch *pieces;  // asked for meanwhile, where there are blocks; may be null
};

// The first pass has a panel from memory, the others from a cache. So that memory is not idle meanwhile, each of them asks
// for its share of the next panel; a pass over floats that is alone is followed by what lies behind.
//
// Few rows go through floats nearly as fast as the processor reads ahead by itself, which it does no more where every
// line is asked for; all others have to.
static inline const float *to_fetch(const float *weight, int in, const Pass &pass) {
    if (pass.total == 1) return weight + 2048;
    return weight + (size_t(in) * pass.next + size_t(in) * pass.number / pass.total) * PANEL;
}

// The same over the blocks at `data`.
static inline Fetch to_fetch(const uint8_t *data, const Matrix &matrix, int num_rows, const Pass &pass) {
    if (pass.total == 1 && num_rows <= FEW_ROWS) return {data, 0, pass.pieces};
    const size_t share = block_bytes(matrix) / pass.total;
    const size_t strip = head_bytes(matrix) + matrix.in / matrix.block * share;
    return {data + panel_bytes(matrix) * pass.next + 2 * strip * pass.number, share, pass.pieces};
}

template <int R>
static inline void float_tile(const Rows &rows, int first, const Matrix &matrix, int panel, const Pass &pass, float *sums) {
    const float *x = rows.values + first * rows.stride;
    const float *weight = static_cast<const float *>(matrix.data) + size_t(panel) * matrix.in * PANEL;
    const float *ahead = to_fetch(weight, matrix.in, pass);
    const int step = (PANEL + pass.total - 1) / pass.total;
    const int lines = pass.total > 1 ? 1 : R > W / 4 ? PANEL / 16 : PANEL / 32;  // asked for at each step
    Vec total[R][2] = {};
    for (int i = 0; i < matrix.in; i++, weight += PANEL) {
        const Vec left = load(weight), right = load(weight + W);
        if (lines > 0) ask_for(ahead);
        if (lines > 1) ask_for(ahead + 16);
        ahead += step;
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const float value = x[r * rows.stride + i];
            total[r][0] += left * value;
            total[r][1] += right * value;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        store(sums + r * PANEL, total[r][0]);
        store(sums + r * PANEL + W, total[r][1]);
    }
}

template <int R>
static inline void tile_of(const Rows &rows, int first, const Matrix &matrix, int panel, const Pass &pass, float *sums) {
    if (matrix.bits == 32) {
        float_tile<R>(rows, first, matrix, panel, pass, sums);
        return;
    }
    const int num_blocks = matrix.in / matrix.block;
    const size_t strip = strip_bytes(matrix);
    const uint8_t *data = static_cast<const uint8_t *>(matrix.data) + 2 * panel * strip;
    Fetch fetch = to_fetch(data, matrix, R, pass);
    for (int half = 0; half < 2; half++, data += strip) {
        if (matrix.bits == 4)
            four_bit_tile<R>(rows.quantized, first, data, num_blocks, fetch, sums + half * W, PANEL);
        else if (is_centred(matrix) && matrix.block == 32)
            centred_tile<R, 32>(rows.quantized, first, data, num_blocks, fetch, sums + half * W, PANEL);
        else if (is_centred(matrix))
            centred_tile<R, 16>(rows.quantized, first, data, num_blocks, fetch, sums + half * W, PANEL);
        else if (matrix.block == 32)
            block_tile<R, 8, 32>(rows.quantized, first, data, num_blocks, fetch, sums + half * W, PANEL);
        else
            block_tile<R, 8, 16>(rows.quantized, first, data, num_blocks, fetch, sums + half * W, PANEL);
    }
}

// sums [num_rows][PANEL] of the rows from `first` on, of which there are at most MAX_TILE_ROWS.
template <int R = 1>
static void tile(
    const Rows &rows, int first, int num_rows, const Matrix &matrix, int panel, const Pass &pass, float *sums) {
    if constexpr (R < MAX_TILE_ROWS) {
        if (num_rows > R) return tile<R + 1>(rows, first, num_rows, matrix, panel, pass, sums);
    }
    tile_of<R>(rows, first, matrix, panel, pass, sums);
}

constexpr int MAX_PASS_ROWS = std::max(MAX_TILE_ROWS, UNPACKED_ROWS);

// How many of so many rows pass over a panel together. To unpack it is worth while for more than two tiles.
static inline int rows_of_a_pass(const Matrix &matrix, int num_rows) {
    return matrix.bits != 32 && num_rows > 2 * MAX_TILE_ROWS ? MAX_PASS_ROWS : MAX_TILE_ROWS;
}

// The sums of a pass: of more rows than a tile has, the panel is unpacked.
static inline void pass_over(
    const Rows &rows, int first, int num_rows, const Matrix &matrix, int panel, const Pass &pass, float *sums) {
#if !defined(__AVX512F__)
    if (num_rows > MAX_TILE_ROWS) {
        const size_t size = panel_bytes(matrix);
        const uint8_t *data = static_cast<const uint8_t *>(matrix.data) + panel * size;
        const uint8_t *ahead = data + pass.next * size;
        const int num_blocks = matrix.in / matrix.block;
        if (matrix.bits == 4)
            unpacked_sums<4, 32>(rows.quantized, first, num_rows, data, num_blocks, ahead, sums);
        else if (matrix.block == 32)
            unpacked_sums<8, 32>(rows.quantized, first, num_rows, data, num_blocks, ahead, sums);
        else
            unpacked_sums<8, 16>(rows.quantized, first, num_rows, data, num_blocks, ahead, sums);
        return;
    }
#endif
    tile(rows, first, num_rows, matrix, panel, pass, sums);
}
