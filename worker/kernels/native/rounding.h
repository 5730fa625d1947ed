// Rows of activations, rounded to whole numbers in blocks of ROW_BLOCK (blocks.h), four blocks at a time.
#pragma once

#include <bit>

#include "across.h"
#include "centred.h"

// ROW_BLOCK whole numbers, each of which fits into a byte.
static inline void store_bytes(int8_t *to, const IntVec *whole) {
#if defined(__AVX512F__)
    for (int i = 0; i < ROW_BLOCK / W; i++) {
        const ByteSizedVec bytes = __builtin_convertvector(whole[i], ByteSizedVec);
        memcpy(to + i * W, &bytes, sizeof bytes);
    }
#else
    const __m256i first = _mm256_packs_epi32((__m256i)whole[0], (__m256i)whole[1]);
    const __m256i second = _mm256_packs_epi32((__m256i)whole[2], (__m256i)whole[3]);
    // Packing goes half by half of a vector, so fours of bytes are back in their order after this.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), bytes);
#endif
}

// A block's numbers, and their sums in PARTS of it, still in lanes.
template <int PARTS>
static inline void store_numbers(const float *x, float inverse, int8_t *numbers, IntVec (&sums)[PARTS]) {
    constexpr int VECTORS = ROW_BLOCK / W, EACH = VECTORS / PARTS;
    IntVec whole[VECTORS];
    for (int i = 0; i < VECTORS; i++) whole[i] = nearest(load(x + i * W) * inverse);
    store_bytes(numbers, whole);
    for (int part = 0; part < PARTS; part++) {
        sums[part] = whole[part * EACH];
        for (int i = 1; i < EACH; i++) sums[part] += whole[part * EACH + i];
    }
}

// Four in a row, or each `step` further on.
static inline void store_four(float *to, size_t step, FourFloats four) {
    if (step == 1) {
        memcpy(to, &four, sizeof four);
        return;
    }
    for (int i = 0; i < TOGETHER; i++) to[i * step] = four[i];
}

// Blocks and where they go: how far it is from each to the next, in x, in rows of what is written, and in sums.
struct Rounding {
    const float *x;
    size_t x_step;
    int8_t *numbers;
    float *scales, *sums;
    size_t step, sum_step;
    int block;
    Start start;
    size_t stride;  // from one sum of a block to its next

    // What is kept of sums of numbers: with what products begin, or sums of values.
    template <typename Floats, typename Ints>
    Floats kept(Floats scale, Ints sums_of_numbers, Floats as_floats) const {
        return start.middle != 0 ? std::bit_cast<Floats>(start(sums_of_numbers)) : scale * as_floats;
    }

    template <int PARTS>
    void round_one() const {
        const float largest = largest_size(x, ROW_BLOCK);
        const float scale = largest / 127.0f + largest * 0.0f;  // NaN of what is not finite
        IntVec its_sums[PARTS];
        store_numbers<PARTS>(x, largest > 0 ? 127.0f / largest : 0.0f, numbers, its_sums);
        *scales = scale;
        for (int part = 0; part < PARTS; part++) {
            const int32_t sum = sum_of(its_sums[part]);
            sums[part * stride] = kept(scale, sum, float(sum));
        }
    }

    template <int PARTS>
    void round_four() const {
        const float *from = x;  // numbers are bytes, which the compiler takes for anything: all else is read before
        const size_t from_step = x_step, to_step = step * ROW_BLOCK;
        const auto most = [&](int i) { return largest_bits(from + i * from_step, ROW_BLOCK); };
        const FourFloats largest = (FourFloats)largest_of({most(0), most(1), most(2), most(3)});
        const FourFloats scale = largest / 127.0f + largest * 0.0f;
        const FourFloats inverse = largest > 0.0f ? 127.0f / largest : FourFloats{};
        IntVec by_part[PARTS][TOGETHER];
        int8_t *to = numbers;
#pragma GCC unroll 4
        for (int i = 0; i < TOGETHER; i++, from += from_step, to += to_step) {
            IntVec its_sums[PARTS];
            store_numbers<PARTS>(from, inverse[i], to, its_sums);
            for (int part = 0; part < PARTS; part++) by_part[part][i] = its_sums[part];
        }
        store_four(scales, step, scale);
        for (int part = 0; part < PARTS; part++) {
            const FourInts sum = sums_of(by_part[part]);
            store_four(sums + part * stride, sum_step, kept(scale, sum, __builtin_convertvector(sum, FourFloats)));
        }
    }

    void skip(int num) {
        x += num * x_step;
        numbers += num * step * ROW_BLOCK;
        scales += num * step;
        sums += num * sum_step;
    }

    template <int PARTS>
    void run_parts(int num) {
        for (; num >= TOGETHER; num -= TOGETHER, skip(TOGETHER)) round_four<PARTS>();
        for (; num > 0; num--, skip(1)) round_one<PARTS>();
    }

    // The weights' blocks are as large, or half as large.
    void run(int num) { block == ROW_BLOCK ? run_parts<1>(num) : run_parts<2>(num); }
};

// Room for so many rows, and some more: so that the blocks of a row are not all in the same sets of the first cache.
static inline size_t room_for(size_t num_rows) { return num_rows < 3 ? num_rows : (num_rows + 1) / 4 * 4 + 2; }

// Rows while they are rounded.
struct RoundedRows {
    int8_t *numbers;  // null: none are
    float *scales, *sums;
    size_t stride;
    int block;
    Start start;

    QuantizedRows finished() const { return {numbers, scales, {sums}, stride}; }
    RoundedRows from(size_t row) const {
        if (numbers == nullptr) return *this;
        return {numbers + row * ROW_BLOCK, scales + row, sums + row, stride, block, start};
    }
    // Of so many rows from `row` on, the block from `at` on: x [num][x_step].
    void write_rows(size_t row, int num, int at, const float *x, size_t x_step) const {
        rounding(row, at, x, x_step, 1, 1).run(num);
    }
    // Of one row, blocks from `at` on: x [num][ROW_BLOCK].
    void write_row(size_t row, int at, int num, const float *x) const {
        rounding(row, at, x, ROW_BLOCK, stride, stride * (ROW_BLOCK / block)).run(num);
    }

  private:
    Rounding rounding(size_t row, int at, const float *x, size_t x_step, size_t step, size_t sum_step) const {
        const size_t place = at / ROW_BLOCK * stride + row;
        return {x, x_step, numbers + place * ROW_BLOCK, scales + place, sums + at / block * stride + row, step, sum_step,
                block, start, stride};
    }
};
