// Whole numbers of 8 bits four by four, and their products, which are exact: so they come out the same in
// any order and with any instructions.
//
// A cache of them has four components of a key side by side, and one component of four keys' values: of a head in a block
// its keys are [D / 4][block_size] quads, its values [block_size / 4][D], and then there is a scale for each token.
#pragma once

#include "across.h"
#include "vector.h"

constexpr int QUAD = 4;
constexpr int MOST_WHOLE = 127;
constexpr int KEY_ZERO = 128;  // numbers of keys are this much more than what they stand for, those of values are not
constexpr float MOST_WEIGHT = 32700.0f;

struct Quad {
    uint8_t numbers[QUAD];
};

typedef uint32_t BitVec __attribute__((vector_size(W * 4)));  // sums, which may go over before they come back

static inline BitVec load(const Quad *from) {
    BitVec value;
    memcpy(&value, from, sizeof value);
    return value;
}

#if defined(__AVX512VNNI__)
// Four numbers of a query.
struct QueryQuad {
    int32_t numbers;
};

// Four keys' weights: their upper bytes, and their lower ones, as far apart as their shuffle leaves them.
struct WeightQuad {
    int32_t upper, lower, none[2];
};

// Sums of products of keys with a query.
struct ScoreSums {
    BitVec sums = {};

    void add(BitVec keys, const QueryQuad &query) {
        sums = (BitVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)keys, _mm512_set1_epi32(query.numbers));
    }
};

// Sums of values times weights.
struct MixedSums {
    BitVec upper = {}, lower = {};

    void add(BitVec values, const WeightQuad &weights) {
        upper = (BitVec)_mm512_dpbusd_epi32((__m512i)upper, _mm512_set1_epi32(weights.upper), (__m512i)values);
        lower = (BitVec)_mm512_dpbusd_epi32((__m512i)lower, _mm512_set1_epi32(weights.lower), (__m512i)values);
    }
    BitVec total() const { return (upper << 8) + lower; }
};

static inline void store(QueryQuad *to, IntVec whole) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtepi32_epi8((__m512i)whole));
}

static inline void store(WeightQuad *to, IntVec whole) {
    const __m512i bytes = _mm512_shuffle_epi8((__m512i)whole, _mm512_set4_epi32(-1, -1, 0x0c080400, 0x0d090501));
    _mm512_storeu_si512(to, bytes);
}
#else
// Four numbers of 16 bits: the first and the third, the second and the fourth.
struct WordQuad {
    int32_t even, odd;
};
typedef WordQuad QueryQuad, WeightQuad;

#if defined(__AVX512F__)
static inline BitVec signed_upper_bytes(BitVec words) { return (BitVec)_mm512_srai_epi16((__m512i)words, 8); }

static inline BitVec products(BitVec words, int32_t others) {
    return (BitVec)_mm512_madd_epi16((__m512i)words, _mm512_set1_epi32(others));
}
#else
static inline BitVec signed_upper_bytes(BitVec words) { return (BitVec)_mm256_srai_epi16((__m256i)words, 8); }

static inline BitVec products(BitVec words, int32_t others) {
    return (BitVec)_mm256_madd_epi16((__m256i)words, _mm256_set1_epi32(others));
}
#endif

struct ScoreSums {
    BitVec sums = {};

    void add(BitVec keys, const QueryQuad &query) {
        constexpr uint32_t EVEN = 0x00ff00ff;
        sums += products(keys & EVEN, query.even) + products(keys >> 8 & EVEN, query.odd);
    }
};

struct MixedSums {
    BitVec sums = {};

    void add(BitVec values, const WeightQuad &weights) {
        sums += products(signed_upper_bytes(values << 8), weights.even) + products(signed_upper_bytes(values), weights.odd);
    }
    BitVec total() const { return sums; }
};

static inline void store(WordQuad *to, IntVec whole) {
    const IntVec upper = whole << 16;
#if defined(__AVX512F__)
    const __m512i words = (__m512i)((whole & 0xffff) | (IntVec)_mm512_shuffle_epi32((__m512i)upper, _MM_PERM_BADC));
    const __m512i halves = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 0, 0, 0, 0), words);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm512_castsi512_si256(halves));
#else
    const __m256i words =
        (__m256i)((whole & 0xffff) | (IntVec)_mm256_shuffle_epi32((__m256i)upper, _MM_SHUFFLE(1, 0, 3, 2)));
    const __m256i halves = _mm256_permute4x64_epi64(words, _MM_SHUFFLE(0, 0, 2, 0));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm256_castsi256_si128(halves));
#endif
}
#endif

// W whole numbers that fit into bytes, as quads `step` from each other.
static inline void store_apart(Quad *to, int step, IntVec whole) {
    typedef int32_t Quads __attribute__((vector_size(W)));
    const Quads quads = (Quads)__builtin_convertvector(whole, ByteSizedVec);
    for (int i = 0; i < W / QUAD; i++) {
        const int32_t quad = quads[i];
        memcpy(to + i * step, &quad, sizeof quad);
    }
}

// As number `number` of a quad each. All others stay untouched.
static inline void store_number(Quad *to, int number, IntVec whole) {
#if defined(__AVX512F__)
    const __mmask64 which = 0x1111111111111111 << number;
    _mm512_mask_storeu_epi8(to, which, (__m512i)(whole << (8 * number)));
#else
    for (int i = 0; i < W; i++) to[i].numbers[number] = uint8_t(whole[i]);
#endif
}

// From numbers up to `largest` to whole ones, and back. All that is too small for it counts as zero; where
// something is not finite the scale is NaN.
template <typename Floats>
struct WholeScale {
    Floats inverse, scale;

    explicit WholeScale(Floats largest) {
        // So that weights of values of one scale are floats beside those of another: what weighs most may have a value of
        // zeros (quad_attention.h).
        constexpr float LEAST = 1e-15f;
        largest = largest < LEAST ? Floats{} + LEAST : largest;
        inverse = float(MOST_WHOLE) / largest;
        scale = largest / float(MOST_WHOLE) + largest * 0.0f;
    }
};
