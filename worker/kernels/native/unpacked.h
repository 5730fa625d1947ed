// Products of blocks with many rows where there is no VNNI: a panel's numbers are unpacked once, a piece that stays in the
// first cache at a time, and all rows pass over it. The sums are those of block_tile, bit for bit.
#pragma once

#include <algorithm>

#include "centred.h"

#if defined(__AVX512F__)
constexpr int UNPACKED_ROWS = 0;
#else
constexpr int UNPACKED_ROWS = 144;  // that pass over a piece before it makes room for the next one
constexpr int ROWS_IN_REGISTERS = 3;

// A block of the two strips of a panel, in numbers below 16, four inputs of each output side by side. Those of 8 bits are
// two of these, the lower half and the upper one.
template <int BITS, int BLOCK>
struct UnpackedBlock {
    static constexpr int HALVES = BITS / 4, STEPS = BLOCK / 4;
    Vec scales[2], minima[2];
    ByteVec numbers[HALVES][STEPS][2];

    // `data`: where the block lies in the first strip; `strip`: bytes from there to the second.
    void unpack(const uint8_t *data, size_t strip) {
        for (int s = 0; s < 2; s++, data += strip) {
            const uint16_t *halves = reinterpret_cast<const uint16_t *>(data);
            scales[s] = load_halves(halves);
            minima[s] = load_halves(halves + W);
            const uint8_t *packed = data + 2 * W * sizeof(uint16_t);
            for (int i = 0; i < STEPS * HALVES / 2; i++, packed += sizeof(ByteVec)) {
                const ByteVec bytes = load_bytes(packed);
                numbers[0][i][s] = bytes & 15;
                (BITS == 4 ? numbers[0][i + STEPS / 2][s] : numbers[1][i][s]) = bytes >> 4;
            }
        }
    }
};

template <int R>
using WholeSums = IntVec[R][2];

// Of R rows and one half of a block's numbers.
template <int R, int STEPS>
static inline void add_up(const ByteVec (&numbers)[STEPS][2], const int8_t *x, WholeSums<R> &sums) {
    WholeSum<4> whole[R][2];
#pragma GCC unroll 8
    for (int i = 0; i < STEPS; i++) {
        const ByteVec left = numbers[i][0], right = numbers[i][1];
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) {
            const int32_t four = four_of(x + r * ROW_BLOCK + 4 * i);
            whole[r][0].add(left, four);
            whole[r][1].add(right, four);
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < R; r++)
        for (int s = 0; s < 2; s++) sums[r][s] = whole[r][s].value();
}

// Blocks of a panel, and how many bytes of what is read next each of them asks for.
template <int BITS, int BLOCK>
struct UnpackedPiece {
    const UnpackedBlock<BITS, BLOCK> *blocks;
    int begin, end;  // in their panel
    size_t share;
};

// Adds to sums[r * 2 * W + o]. Not inlined, so that all registers are for it.
template <int R, int BITS, int BLOCK>
[[gnu::noinline]] static void unpacked_tile(
    const QuantizedRows &rows, int first, const UnpackedPiece<BITS, BLOCK> &piece, const uint8_t *ahead, float *sums) {
    constexpr int PER_SCALE = ROW_BLOCK / BLOCK;
    const UnpackedBlock<BITS, BLOCK> *block = piece.blocks;
    Vec total[R][2];
    for (int r = 0; r < R; r++)
        for (int s = 0; s < 2; s++) total[r][s] = load(sums + (2 * r + s) * W);
    for (int b = piece.begin; b < piece.end; b++, block++, ahead += piece.share) {
        for (size_t at = 0; at < piece.share; at += 64) __builtin_prefetch(ahead + at);
        const size_t place = b / PER_SCALE * rows.stride + first;
        const int8_t *numbers = rows.numbers + place * ROW_BLOCK + b % PER_SCALE * BLOCK;
        const float *scales = rows.scales + place, *row_sums = rows.sums + b * rows.stride + first;
        WholeSums<R> whole;
        add_up<R>(block->numbers[0], numbers, whole);
        if constexpr (BITS == 8) {
            WholeSums<R> upper;
            add_up<R>(block->numbers[1], numbers, upper);
#pragma GCC unroll 3
            for (int r = 0; r < R; r++)
                for (int s = 0; s < 2; s++) whole[r][s] += upper[r][s] << 4;
        }
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) {
            for (int s = 0; s < 2; s++) {
                total[r][s] += block->minima[s] * row_sums[r];
                total[r][s] += __builtin_convertvector(whole[r][s], Vec) * (block->scales[s] * scales[r]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int s = 0; s < 2; s++) store(sums + (2 * r + s) * W, total[r][s]);
}

// sums [num_rows][2 * W] of at most UNPACKED_ROWS rows and the panel at `data`. `ahead`: what is read next, as many bytes.
template <int BITS, int BLOCK>
static void unpacked_sums(
    const QuantizedRows &rows, int first, int num_rows, const uint8_t *data, int num_blocks, const uint8_t *ahead,
    float *sums) {
    constexpr int BLOCKS = 24 * 4 / BITS;
    UnpackedBlock<BITS, BLOCK> blocks[BLOCKS];
    const int num_tiles = (num_rows + ROWS_IN_REGISTERS - 1) / ROWS_IN_REGISTERS;
    const size_t size = block_bytes(BITS, BLOCK), share = 2 * size / num_tiles + 1;
    memset(sums, 0, size_t(num_rows) * 2 * W * sizeof(float));
    for (int begin = 0; begin < num_blocks; begin += BLOCKS) {
        const int end = std::min(begin + BLOCKS, num_blocks);
        for (int b = begin; b < end; b++) blocks[b - begin].unpack(data + b * size, num_blocks * size);
        const UnpackedPiece<BITS, BLOCK> piece{blocks, begin, end, share};
        for (int row = 0; row < num_rows; row += ROWS_IN_REGISTERS, ahead += (end - begin) * share) {
            float *to = sums + row * 2 * W;
            if (num_rows - row >= 3)
                unpacked_tile<3>(rows, first + row, piece, ahead, to);
            else if (num_rows - row == 2)
                unpacked_tile<2>(rows, first + row, piece, ahead, to);
            else
                unpacked_tile<1>(rows, first + row, piece, ahead, to);
        }
    }
}
#endif
