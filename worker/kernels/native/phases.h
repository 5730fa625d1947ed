// What a step's phases do, each a function of a task and a number of its chunk.
#pragma once

#include <algorithm>
#include <cmath>

#include "best.h"
#include "matrix.h"
#include "outputs.h"
#include "pool.h"
#include "rounding.h"

enum class Into { store, add, gate, best };

// A norm of the rows that a product adds to. It multiplies by its weights at once, and leaves the row's share, which needs
// the whole row, to the next product: whole numbers of a block are the same with any factor.
struct Norm {
    const float *weights;  // null: there is none
    float *values;  // [rows][out], where the next product reads floats
    Shares shares;
};

// out [rows][out] = x Wᵀ + bias, or added to what is there; or gated, of a matrix whose outputs are gates, then ups; or
// nowhere, while each row's best output is looked for.
// Gated rows, or normed ones, that the next product reads in whole numbers are rounded at once, to `rounded`: gated ones
// in place of `out`.
struct Product {
    Rows rows;
    int num_rows;
    Matrix matrix;
    float *out;
    size_t out_stride;
    Into into;
    int num_threads;
    int rows_per_chunk, panel_chunks;
    Gate gate = {};
    RoundedRows rounded = {};
    Norm norm = {};
    Best *bests = nullptr;  // [threads][rows]
    Pieces pieces = {};  // of the cache, read by the phases behind it: asked for meanwhile, if the matrix has blocks

    bool is_rounded() const { return rounded.numbers != nullptr; }
    bool is_normed() const { return norm.weights != nullptr; }
    // Of more than the caches near a core hold, nobody finds anything there anyway.
    bool is_streamed() const {
        constexpr size_t MANY_BYTES = 1 << 20, VECTOR = W * sizeof(float);
        return into == Into::store && num_rows * out_stride * sizeof(float) > MANY_BYTES &&
               out_stride % W == 0 && reinterpret_cast<uintptr_t>(out) % VECTOR == 0;
    }
    // Panels that are computed together.
    int unit() const { return is_rounded() ? ROW_BLOCK / PANEL : 1; }
};

constexpr int MAX_CHUNK_ROWS = 1024;  // a chunk has their shares at hand

// Gates and their ups count as one.
static inline int panels_of(const Product &product) {
    return num_panels(product.matrix) / (product.into == Into::gate ? 2 : 1);
}

// Rows of a chunk stay in the second cache while panels pass by; few rows are all in every chunk. Its panels lie one
// behind the other: a processor reads ahead of who goes straight on, and two threads that took panels in turn would
// read each other's. There are the more chunks the longer a panel takes, so that a thread which is displaced in one of
// them leaves the others to the next.
static inline int plan(Product &product) {
    constexpr int CACHED_BYTES = 320 * 1024, RUN_BYTES = 128 * 1024;
    const int cached = CACHED_BYTES / row_bytes(product.matrix);
    const int fitting = std::min(MAX_CHUNK_ROWS, cached) / MAX_TILE_ROWS * MAX_TILE_ROWS;
    product.rows_per_chunk = std::max(1, std::min(product.num_rows, std::max(MAX_TILE_ROWS, fitting)));
    const int row_chunks = (product.num_rows + product.rows_per_chunk - 1) / product.rows_per_chunk;
    const int panels = panels_of(product), runs = int(panels * panel_bytes(product.matrix) / RUN_BYTES);
    const int enough = std::max(runs, product.num_threads * (1 + product.num_rows));
    product.panel_chunks = std::min(panels / product.unit(), row_chunks > 1 ? 8 : enough);
    return row_chunks * product.panel_chunks;
}

[[gnu::always_inline]] static inline void write_rows(
    const Product &product, int row, int num, int panel, const Outputs &outputs, bool is_streamed) {
    const int width = width_of(product.matrix, panel);
    const size_t stride = product.out_stride;
    const bool adds = product.into == Into::add;
    float *out = product.out + size_t(row) * stride + panel * PANEL;
    if (width < PANEL) {
        for (int r = 0; r < num; r++, out += stride)
            for (int i = 0; i < width; i++) out[i] = adds ? out[i] + outputs.one(r, i) : outputs.one(r, i);
    } else if (is_streamed) {
        each_vector(outputs, num, out, stride, stream);
    } else if (adds) {
        each_vector(outputs, num, out, stride, [](float *to, Vec value) { store(to, load(to) + value); });
    } else {
        each_vector(outputs, num, out, stride, [](float *to, Vec value) { store(to, value); });
    }
}

// The same of rows whose best outputs are looked for.
[[gnu::always_inline]] static inline void see_rows(
    const Matrix &matrix, int num, int panel, const Outputs &outputs, Best *bests) {
    const int first = panel * PANEL, width = width_of(matrix, panel);
    for (int r = 0; r < num; r++)
        for (int i = 0; i < width; i += W) bests[r].see(outputs.vector(r, i, width - i), width - i, first + i);
}

// What the norm makes of a panel of rows, which are complete there now: normed [num][stride].
[[gnu::always_inline]] static inline void add_normed_rows(
    const Product &product, int row, int num, int panel, const Outputs &outputs, float *normed, size_t stride) {
    const int first = panel * PANEL, width = width_of(product.matrix, panel);
    const size_t x_stride = product.out_stride;
    const float *weights = product.norm.weights + first;
    float *x = product.out + size_t(row) * x_stride + first;
    float *squares = product.norm.shares.squares + size_t(panel) * product.num_rows + row;
    for (int r = 0; r < num; r += TOGETHER) {
        Vec sums[TOGETHER] = {};
        const int some = std::min(TOGETHER, num - r);
        for (int i = 0; i < some; i++, x += x_stride, normed += stride)
            sums[i] = width == PANEL ? add_normed(outputs, r + i, x, weights, normed)
                                     : add_normed(outputs, r + i, x, weights, normed, width);
        const FourFloats found = sums_of(sums);
        memcpy(squares + r, &found, some * sizeof(float));
    }
}

// What the rows of a pass write to, in as many pages: meanwhile it comes into the first cache.
static inline void ask_for_out(const Product &product, int row, int num, int panel) {
    const float *out = product.out + size_t(row) * product.out_stride + panel * PANEL;
    for (int r = 0; r < num; r++, out += product.out_stride)
        for (int i = 0; i < PANEL; i += 16) __builtin_prefetch(out + i, 1);
}

// Of the rows of a pass, from `row` on, with their shares, and of a unit of panels.
static inline void compute(
    const Product &product, int row, int num, const float *shares, int panel, const Pass &pass, int thread) {
    alignas(64) float sums[2][MAX_PASS_ROWS * PANEL], blocks[MAX_PASS_ROWS * ROW_BLOCK];
    const bool is_gated = product.into == Into::gate, is_best = product.into == Into::best;
    const bool is_rounded = product.is_rounded(), is_streamed = product.is_streamed();
    const bool is_out = !is_streamed && !is_best && !(is_gated && is_rounded);
    const int panels = panels_of(product), unit = product.unit();
    for (int p = 0; p < unit; p++) {
        if (is_out) ask_for_out(product, row, num, panel + p);
        pass_over(product.rows, row, num, product.matrix, panel + p, pass, sums[0]);
        if (is_gated) pass_over(product.rows, row, num, product.matrix, panels + panel + p, pass, sums[1]);
        const Outputs outputs{sums[0], shares, bias_at(product.matrix, (panel + p) * PANEL)};
        const size_t at = size_t(row) * product.out_stride + (panel + p) * PANEL;
        float *block = blocks + p * PANEL;
        if (is_best) {
            see_rows(product.matrix, num, panel + p, outputs, product.bests + size_t(thread) * product.num_rows + row);
        } else if (is_gated) {
            const Outputs ups{sums[1], shares, bias_at(product.matrix, (panels + panel + p) * PANEL)};
            float *out = is_rounded ? block : product.out + at;
            write_gated(product.gate, num, outputs, ups, out, is_rounded ? ROW_BLOCK : product.out_stride);
        } else if (!product.is_normed()) {
            write_rows(product, row, num, panel + p, outputs, is_streamed);
        } else {
            float *normed = is_rounded ? block : product.norm.values + at;
            const size_t stride = is_rounded ? ROW_BLOCK : product.out_stride;
            add_normed_rows(product, row, num, panel + p, outputs, normed, stride);
        }
    }
    if (is_rounded) product.rounded.write_rows(row, num, panel * PANEL, blocks, ROW_BLOCK);
}

// For a chunk that makes so many passes over panels.
static inline PieceFetch fetch_of(const Product &product, int number, int num_passes) {
    if (product.pieces.num == 0) return {};
    const int times = num_passes * 2 * (product.matrix.in / product.matrix.block);
    return {product.pieces.part(number, product.panel_chunks), times};
}

static void run_product(const void *task, int chunk, int thread) {
    const Product &product = *static_cast<const Product *>(task);
    const int unit = product.unit(), units = panels_of(product) / unit;
    const int number = place_of(chunk % product.panel_chunks, product.panel_chunks, product.num_threads);
    const int begin = units * number / product.panel_chunks, end = units * (number + 1) / product.panel_chunks;
    const int first = chunk / product.panel_chunks * product.rows_per_chunk;
    const int last = std::min(product.num_rows, first + product.rows_per_chunk);
    const int most = rows_of_a_pass(product.matrix, last - first), passes = (last - first + most - 1) / most;
    const int even = (last - first + passes - 1) / passes;  // and whole fours, as which rows are rounded
    const int rows_per_pass = std::min(most, (even + TOGETHER - 1) / TOGETHER * TOGETHER);
    PieceFetch pieces = fetch_of(product, number, (end - begin) * unit * passes);
    // Only beside the last rows, behind which the pieces are read.
    const bool asks = product.pieces.num > 0 && last == product.num_rows;
    Pass pass{0, passes, unit, asks ? &pieces : nullptr};
    float shares[MAX_CHUNK_ROWS + W];
    product.rows.shares.find(first, last, shares);
    for (int panel = begin * unit; panel < end * unit; panel += unit)
        for (int row = first; row < last; row += rows_per_pass) {
            pass.number = (row - first) / rows_per_pass;
            compute(product, row, std::min(rows_per_pass, last - row), shares + row - first, panel, pass, thread);
        }
    if (product.is_streamed()) finish_streams();
}

// Rows brought into the form that a product reads: normed where there is a norm, rounded where its matrix has blocks.
struct Prepare {
    const float *x;
    int size, num_rows;
    const float *norm;  // null: none
    float eps;
    float *out;  // where a norm writes: rows, or if these are rounded, one for each thread, that stays with its core
    RoundedRows rounded;
    const int *places = nullptr;   // of rows in `out`; null: in their order
    const int *sources = nullptr;  // rows of x; the same
};

constexpr int ROWS_PER_CHUNK = 4;

static inline int row_chunks(int num_rows) { return (num_rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK; }

static inline float inverse_rms(const float *x, int size, float eps) {
    Vec squares = {};
    int i = 0;
    for (; i + W <= size; i += W) squares += load(x + i) * load(x + i);
    float total = sum_of(squares);
    for (; i < size; i++) total += x[i] * x[i];
    return 1.0f / std::sqrt(total / float(size) + eps);
}

static void run_prepare(const void *task, int chunk, int thread) {
    const Prepare &prepare = *static_cast<const Prepare *>(task);
    const int last = std::min(prepare.num_rows, (chunk + 1) * ROWS_PER_CHUNK), size = prepare.size;
    const bool is_rounded = prepare.rounded.numbers != nullptr;
    for (int row = chunk * ROWS_PER_CHUNK; row < last; row++) {
        const float *x = prepare.x + size_t(prepare.sources == nullptr ? row : prepare.sources[row]) * size;
        if (prepare.norm != nullptr) {
            const int place = is_rounded ? thread : prepare.places == nullptr ? row : prepare.places[row];
            float *out = prepare.out + size_t(place) * size;
            const float share = inverse_rms(x, size, prepare.eps);
            for (int i = 0; i < size; i++) out[i] = x[i] * share * prepare.norm[i];
            x = out;
        }
        if (is_rounded) prepare.rounded.write_row(row, 0, size / ROW_BLOCK, x);
    }
}

struct Gather {
    const float *from;
    size_t width;
    const int *rows;
    float *to;
};

static void run_gather(const void *task, int row, int) {
    const Gather &gather = *static_cast<const Gather *>(task);
    memcpy(gather.to + row * gather.width, gather.from + gather.rows[row] * gather.width, gather.width * sizeof(float));
}
