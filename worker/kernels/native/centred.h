// Weights of 8 bits where there is VNNI and each minimum is the same multiple of its scale, as most formats have it:
//
//     weight = scale * (number - middle).
//
// A block's sum begins with -middle times the sum of the row's numbers, so no product with a minimum is left. The scales of
// two blocks lie before the numbers of both, in half precision.
#pragma once

#include "whole_scales.h"

static inline bool is_centred(const Matrix &matrix) {
    return HAS_WHOLE_SCALES && matrix.bits == 8 && matrix.middle != 0;
}

constexpr size_t SCALES_BYTES = 2 * W * sizeof(uint16_t);  // of two blocks

static inline const uint16_t *scales_of(const uint8_t *pair, int block) {
    return reinterpret_cast<const uint16_t *>(pair) + block % 2 * W;
}

// One output's weights of a strip, as floats: out [in].
static inline void unpack_centred(const uint8_t *data, int o, const Matrix &matrix, float *out) {
    const uint8_t *pair = data;
    for (int b = 0; b < matrix.in / matrix.block; b++) {
        if (b % 2 == 0) pair = data, data += SCALES_BYTES;
        const float scale = half_to_float(scales_of(pair, b)[o]);
        for (int i = 0; i < matrix.block; i++, out++)
            *out = scale * float(data[i / 4 * 4 * W + 4 * o + i % 4] - matrix.middle);
        data += matrix.block * W;
    }
}

#if defined(__AVX512VNNI__)
// sums[r * stride + o] of W outputs, as block_tile.
template <int R, int BLOCK>
static inline void centred_tile(
    const QuantizedRows &rows, int first, const uint8_t *data, int num_blocks, Fetch &fetch, float *sums, int stride) {
    constexpr int PER_SCALE = ROW_BLOCK / BLOCK;
    const int32_t *starts = rows.starts + first;
    const uint8_t *pair = data;
    Vec total[R] = {};
    for (int b = 0; b < num_blocks; b++, starts += rows.stride) {
        const size_t place = b / PER_SCALE * rows.stride + first;
        const int8_t *numbers = rows.numbers + place * ROW_BLOCK + b % PER_SCALE * BLOCK;
        if (b % 2 == 0) pair = data, data += SCALES_BYTES;
        const Vec scale = load_halves(scales_of(pair, b));
        fetch.more<R>();
        RowSum<R> whole[R];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) whole[r].begin(starts[r]);
#pragma GCC unroll 8
        for (int s = 0; s < BLOCK / 4; s++, data += 4 * W) {
            const ByteVec bytes = load_bytes(data);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) whole[r].add(bytes, numbers + r * ROW_BLOCK + 4 * s, s);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
            total[r] += __builtin_convertvector((IntVec)whole[r].value(), Vec) * (scale * rows.scales[place + r]);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) store(sums + r * stride, total[r]);
}
#else
template <int R, int BLOCK>
static inline void centred_tile(
    const QuantizedRows &rows, int first, const uint8_t *data, int num_blocks, Fetch &fetch, float *sums, int stride) {
    block_tile<R, 8, BLOCK>(rows, first, data, num_blocks, fetch, sums, stride);
}
#endif

// Of what a strip begins with.
static inline size_t head_bytes(const Matrix &matrix) { return has_whole_scales(matrix) ? W * sizeof(float) : 0; }

// Of a block, with its scales and minima.
static inline size_t block_bytes(const Matrix &matrix) {
    return is_centred(matrix) ? SCALES_BYTES / 2 + W * matrix.block : block_bytes(matrix.bits, matrix.block);
}

static inline size_t strip_bytes(const Matrix &matrix) {
    const int num_blocks = matrix.in / matrix.block;
    const size_t unused = is_centred(matrix) ? num_blocks % 2 * (SCALES_BYTES / 2) : 0;
    return head_bytes(matrix) + num_blocks * block_bytes(matrix) + unused;
}

// One output's weights of a panel of two strips, as floats: out [in].
static inline void unpack_row(const uint8_t *panel, int place, const Matrix &matrix, float *out) {
    const uint8_t *strip = panel + (place / W) * strip_bytes(matrix);
    if (has_whole_scales(matrix))
        unpack_whole(strip, place % W, matrix.in, out);
    else if (is_centred(matrix))
        unpack_centred(strip, place % W, matrix, out);
    else
        unpack_halves(strip, place % W, matrix.in, matrix.bits, matrix.block, out);
}

// With what the sums of a block's numbers begin.
struct Start {
    int middle = 0;  // 0: with nothing, and minima are multiplied by sums of values
    bool has_whole_scales = false;

    static Start of(const Matrix &matrix) {
        if (::has_whole_scales(matrix)) return {MIDDLE, true};
        return {is_centred(matrix) ? matrix.middle : 0, false};
    }
    template <typename Ints>
    Ints operator()(Ints sum_of_numbers) const {
        return has_whole_scales ? start_of(sum_of_numbers) : sum_of_numbers * -middle;
    }
};
