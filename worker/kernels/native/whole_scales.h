// Weights of 4 bits where there is VNNI: their scales are whole numbers, too. A weight of output o is
//
//     unit[o] * (scale * (number - 8) - 8 * minimum),
//
// its block's scale and minimum below 2^15 and the unit a power of two: so scales in half precision stay what they are
// down to an eighth of the output's largest, and others are off by 2^-15 of that. A strip begins with the W units; a block
// with W pairs, in each the scale below the minimum; then its numbers as in blocks.h.
//
// The sum of a block, number - 8 times what a row has, fits into 16 bits: 32 * 8 * 127. So one instruction multiplies it by
// the scale, beside it -8 times the sum of the row's numbers by the minimum, and adds the two. With floats these are two
// instructions, and one more for the row's scale: each of these takes as long as four inputs do.
#pragma once

#include "blocks.h"

#if defined(__AVX512VNNI__)
constexpr bool HAS_WHOLE_SCALES = true;
#else
constexpr bool HAS_WHOLE_SCALES = false;
#endif

constexpr int MIDDLE = 8;       // of numbers below 16
constexpr float MOST = 32767;  // of scales and minima

static inline bool has_whole_scales(const Matrix &matrix) { return HAS_WHOLE_SCALES && matrix.bits == 4; }

// With which a block's sum begins: -8 times the sum of the row's numbers, and once more in the upper half, to be multiplied
// by the minimum. A sum below zero borrows one there, so every second upper half has one more: the minimum is multiplied
// by what is off by an eighth of a whole number at most, either way as often.
template <typename Ints>
static inline Ints start_of(Ints sum_of_numbers) {
    return sum_of_numbers * (-MIDDLE * ((1 << 16) + 1)) + ((sum_of_numbers & 1) << 16);
}

// What W outputs need their units for: the largest of their scales and minima.
struct Reach {
    Vec most = {}, bad = {};

    void add(Vec scale, Vec minimum) {
        most = larger(size_of(scale), larger(size_of(centred(scale, minimum)), most));
        bad += scale * 0.0f + minimum * 0.0f;
    }
    // NaN where one is not finite.
    Vec units() const { return powers() + bad; }

    IntVec pair(Vec scale, Vec minimum) const {
        const Vec inverse = choose(most > 0.0f, 1.0f / powers(), Vec{});
        return (nearest(scale * inverse) & 0xffff) | nearest(centred(scale, minimum) * inverse) << 16;
    }

  private:
    static Vec size_of(Vec x) { return (Vec)((IntVec)x & 0x7fffffff); }
    // weight = scale * (number - 8) - 8 * what this returns
    static Vec centred(Vec scale, Vec minimum) { return (minimum + scale * float(MIDDLE)) * (-1.0f / MIDDLE); }
    // The next power of two.
    Vec powers() const { return (Vec)(((IntVec)(most / MOST) + 0x7fffff) & 0x7f800000); }
};

// One output's weights of a strip, as floats: out [in].
static inline void unpack_whole(const uint8_t *strip, int o, int in, float *out) {
    float unit;
    memcpy(&unit, strip + o * sizeof unit, sizeof unit);
    const uint8_t *data = strip + W * sizeof unit;
    for (int at = 0; at < in; at += ROW_BLOCK, data += block_bytes(4, ROW_BLOCK)) {
        int16_t pair[2];
        memcpy(pair, data + o * sizeof pair, sizeof pair);
        for (int i = 0; i < ROW_BLOCK; i++) {
            const uint8_t byte = data[4 * W + i % (ROW_BLOCK / 2) / 4 * 4 * W + 4 * o + i % 4];
            const int number = i < ROW_BLOCK / 2 ? byte & 15 : byte >> 4;
            out[at + i] = unit * float(pair[0] * (number - MIDDLE) - MIDDLE * pair[1]);
        }
    }
}

#if defined(__AVX512VNNI__)
// What a block of W outputs and one of R rows adds up to. Of up to eight rows it is two chains of additions, since in one
// each would wait for the one before it; more rows have no registers for that.
template <int R>
class RowSum {
  public:
    void begin(int32_t start) {
        chains_[0] = _mm512_set1_epi32(start);
        if constexpr (CHAINS == 2) chains_[1] = _mm512_setzero_si512();
    }

    // Byte 4 o + j of the weights times byte j of `four`; `number`: how many came before.
    void add(ByteVec weights, const int8_t *four, int number) {
        __m512i &chain = chains_[number % CHAINS];
        if constexpr (R > FEW_ROWS)  // GCC has the four bytes in a register first, which is one more instruction
            asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(chain) : "v"(weights), "m"(*reinterpret_cast<const int8_t(*)[4]>(four)));
        else
            chain = _mm512_dpbusd_epi32(chain, (__m512i)weights, _mm512_set1_epi32(four_of(four)));
    }

    __m512i value() const { return CHAINS == 2 ? _mm512_add_epi32(chains_[0], chains_[CHAINS - 1]) : chains_[0]; }

  private:
    static constexpr int CHAINS = R <= 8 ? 2 : 1;
    __m512i chains_[CHAINS];
};

// sums[r * stride + o] of W outputs, as block_tile.
template <int R>
static inline void four_bit_tile(
    const QuantizedRows &rows, int first, const uint8_t *strip, int num_blocks, Fetch &fetch, float *sums, int stride) {
    Vec units;
    memcpy(&units, strip, sizeof units);
    const uint8_t *data = strip + sizeof units;
    fetch.more(sizeof units);
    Vec total[R] = {};
    for (int b = 0; b < num_blocks; b++) {
        const size_t place = b * rows.stride + first;
        const int8_t *numbers = rows.numbers + place * ROW_BLOCK;
        const ByteVec pairs = load_bytes(data);
        data += sizeof pairs;
        fetch.more<R>();
        RowSum<R> whole[R];
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) whole[r].begin(rows.starts[place + r]);
#pragma GCC unroll 4
        for (int s = 0; s < ROW_BLOCK / 8; s++, data += 4 * W) {
            const ByteVec bytes = load_bytes(data), low = bytes & 15, high = bytes >> 4;
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const int8_t *x = numbers + r * ROW_BLOCK + 4 * s;
                whole[r].add(low, x, 0);
                whole[r].add(high, x + ROW_BLOCK / 2, 1);
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
            total[r] += __builtin_convertvector((IntVec)_mm512_madd_epi16(whole[r].value(), (__m512i)pairs), Vec) *
                        rows.scales[place + r];
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) store(sums + r * stride, total[r] * units);
}
#else
template <int R>
static inline void four_bit_tile(
    const QuantizedRows &rows, int first, const uint8_t *data, int num_blocks, Fetch &fetch, float *sums, int stride) {
    block_tile<R, 4, ROW_BLOCK>(rows, first, data, num_blocks, fetch, sums, stride);
}
#endif
