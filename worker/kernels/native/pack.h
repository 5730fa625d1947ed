// How weights become panels (matrix.h, blocks.h); each panel is a chunk.
#pragma once

#include <algorithm>

#include "matrix.h"

struct PackFloats {
    Matrix matrix;
    const float *weight;  // [out][in]
    float *to;
};

static void pack_floats(const void *task, int panel, int) {
    const PackFloats &pack = *static_cast<const PackFloats *>(task);
    const Matrix &matrix = pack.matrix;
    float *to = pack.to + size_t(panel) * matrix.in * PANEL;
    const int first = panel * PANEL, num = std::min(PANEL, matrix.out - first);
    if (num < PANEL) memset(to, 0, size_t(matrix.in) * PANEL * sizeof(float));
    constexpr int PIECE = 16;  // inputs whose outputs stay in the first cache
    for (int begin = 0; begin < matrix.in; begin += PIECE) {
        const int end = std::min(matrix.in, begin + PIECE);
        for (int o = 0; o < num; o++) {
            const float *row = pack.weight + size_t(first + o) * matrix.in;
            for (int i = begin; i < end; i++) to[size_t(i) * PANEL + o] = row[i];
        }
    }
}

// Shared with Python (library.py), field by field: weights in blocks, as they wait to be packed.
struct Stored {
    const uint8_t *numbers;           // [out][in / UNIT][bytes of a unit]
    const uint16_t *scales, *minima;  // [out][in / block], in half precision
    // From one to the next, of a row and within it: numbers in bytes, the others in halves of a float.
    int64_t number_row, number_step, scale_row, scale_step, minimum_row, minimum_step;
    int32_t block;
    int32_t form;  // Form
};

constexpr int UNIT = 32;

// How the numbers of a unit lie: a byte each, or two in a byte: number i below number i + 16, or below the next one.
enum Form { IN_BYTES, IN_HALVES, IN_PAIRS };

// Inputs i to i + 3 of a row, i a multiple of 4, in a byte each.
template <Form F>
static inline uint32_t four_numbers(const Stored &stored, const uint8_t *row, int i) {
    const uint8_t *unit = row + i / UNIT * stored.number_step;
    const int at = i % UNIT;
    uint32_t four = 0;
    if constexpr (F == IN_BYTES) {
        memcpy(&four, unit + at, sizeof four);
        return four;
    }
    if constexpr (F == IN_HALVES) {
        memcpy(&four, unit + at % (UNIT / 2), sizeof four);
        return (at < UNIT / 2 ? four : four >> 4) & 0x0f0f0f0f;
    }
    memcpy(&four, unit + at / 2, 2);
    four = (four | four << 8) & 0x00ff00ff;
    return (four | four << 4) & 0x0f0f0f0f;
}

struct PackBlocks {
    Matrix matrix;
    Stored stored;
    uint8_t *to;

    const uint8_t *numbers(size_t row) const { return stored.numbers + row * stored.number_row; }
    // Of the block that has input i.
    uint16_t scale(size_t row, int i) const {
        return stored.scales[row * stored.scale_row + i / stored.block * stored.scale_step];
    }
    uint16_t minimum(size_t row, int i) const {
        return stored.minima[row * stored.minimum_row + i / stored.block * stored.minimum_step];
    }
};

// The numbers of a block of W outputs, of which there are `num`.
template <Form F>
static void pack_numbers(const PackBlocks &pack, int first, int num, int at, uint8_t *to) {
    const int block = pack.matrix.block, steps = block * pack.matrix.bits / 32;
    for (int o = 0; o < num; o++) {
        const uint8_t *row = pack.numbers(first + o);
        for (int s = 0; s < steps; s++) {
            uint32_t four = four_numbers<F>(pack.stored, row, at + 4 * s);
            if (pack.matrix.bits == 4) four |= four_numbers<F>(pack.stored, row, at + block / 2 + 4 * s) << 4;
            memcpy(to + 4 * (s * W + o), &four, sizeof four);
        }
    }
}

// Scales and minima of a block of W outputs, in half precision; zero where there is no such output.
struct Halves {
    uint16_t scales[W] = {}, minima[W] = {};

    Halves(const PackBlocks &pack, int first, int num, int at) {
        for (int o = 0; o < num; o++) scales[o] = pack.scale(first + o, at), minima[o] = pack.minimum(first + o, at);
    }
};

template <Form F>
static void pack_centred(const PackBlocks &pack, int first, int num, uint8_t *to) {
    const Matrix &matrix = pack.matrix;
    uint8_t *pair = to;
    for (int b = 0; b < matrix.in / matrix.block; b++, to += W * matrix.block) {
        if (b % 2 == 0) pair = to, to += SCALES_BYTES;
        const Halves halves(pack, first, num, b * matrix.block);
        memcpy(pair + b % 2 * sizeof halves.scales, halves.scales, sizeof halves.scales);
        pack_numbers<F>(pack, first, num, b * matrix.block, to);
    }
}

template <Form F>
static void pack_strip(const PackBlocks &pack, int first, uint8_t *to) {
    const Matrix &matrix = pack.matrix;
    const int block = matrix.block, num = std::min(W, matrix.out - first);
    const bool is_whole = has_whole_scales(matrix);
    memset(to, 0, strip_bytes(matrix));
    if (is_centred(matrix)) return pack_centred<F>(pack, first, num, to);
    Reach reach;
    if (is_whole) {
        for (int at = 0; at < matrix.in; at += block) {
            const Halves halves(pack, first, num, at);
            reach.add(load_halves(halves.scales), load_halves(halves.minima));
        }
        const Vec units = reach.units();
        memcpy(to, &units, sizeof units);
        to += sizeof units;
    }
    for (int at = 0; at < matrix.in; at += block, to += block_bytes(matrix.bits, block)) {
        const Halves halves(pack, first, num, at);
        const IntVec pairs = reach.pair(load_halves(halves.scales), load_halves(halves.minima));
        memcpy(to, is_whole ? static_cast<const void *>(&pairs) : &halves, sizeof pairs);
        pack_numbers<F>(pack, first, num, at, to + sizeof pairs);
    }
}

typedef uint8_t SmallVec __attribute__((vector_size(W)));

// A panel of floats. A product of a scale and a number has no more than 19 bits, so it is the same whether its sum with
// the minimum is one operation or two.
template <Form F>
static void expand_panel(const PackBlocks &pack, int first, float *to) {
    const Matrix &matrix = pack.matrix;
    const int step = std::min(pack.stored.block, UNIT), num = std::min(PANEL, matrix.out - first);
    uint16_t scales[PANEL] = {}, minima[PANEL] = {};
    uint8_t numbers[UNIT][PANEL] = {};
    for (int at = 0; at < matrix.in; at += step) {
        for (int o = 0; o < num; o++) {
            scales[o] = pack.scale(first + o, at), minima[o] = pack.minimum(first + o, at);
            const uint8_t *row = pack.numbers(first + o);
            for (int i = 0; i < step; i += 4) {
                const uint32_t four = four_numbers<F>(pack.stored, row, at + i);
                for (int j = 0; j < 4; j++) numbers[i + j][o] = uint8_t(four >> 8 * j);
            }
        }
        for (int half = 0; half < PANEL; half += W) {
            const Vec scale = load_halves(scales + half), minimum = load_halves(minima + half);
            for (int i = 0; i < step; i++) {
                SmallVec small;
                memcpy(&small, numbers[i] + half, sizeof small);
                store(to + size_t(at + i) * PANEL + half, __builtin_convertvector(small, Vec) * scale + minimum);
            }
        }
    }
}

template <Form F>
static void pack_panel(const PackBlocks &pack, int panel) {
    uint8_t *to = pack.to + panel * panel_bytes(pack.matrix);
    if (pack.matrix.bits == 32) {
        expand_panel<F>(pack, panel * PANEL, reinterpret_cast<float *>(to));
        return;
    }
    for (int half = 0; half < 2; half++)
        pack_strip<F>(pack, panel * PANEL + half * W, to + half * (panel_bytes(pack.matrix) / 2));
}

static void pack_blocks(const void *task, int panel, int) {
    const PackBlocks &pack = *static_cast<const PackBlocks *>(task);
    switch (pack.stored.form) {
        case IN_BYTES: return pack_panel<IN_BYTES>(pack, panel);
        case IN_HALVES: return pack_panel<IN_HALVES>(pack, panel);
        default: return pack_panel<IN_PAIRS>(pack, panel);
    }
}
