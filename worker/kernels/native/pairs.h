// Pairs of bfloat16, which some processors multiply and add up two by two, at the price of one multiplication of floats. A
// cache of them has two components of a key side by side, and one component of two keys' values: a block's keys are
// [heads][D / 2][block_size] pairs, its values [heads][block_size / 2][D].
#pragma once

#include "bfloat16.h"

struct Pair {
    BFloat16 numbers[2];
};

#if defined(__AVX512BF16__)
typedef __m512bh PairVec;

static inline PairVec load(const Pair *from) { return (PairVec)_mm512_loadu_si512(from); }

static inline void store(Pair *to, PairVec pairs) { _mm512_storeu_si512(to, (__m512i)pairs); }

// Of W floats each, the nearest; those of `first` come first.
static inline PairVec pairs_of(Vec first, Vec second) { return _mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }

static inline PairVec splat(Pair pair) {
    int32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return (PairVec)_mm512_set1_epi32(bits);
}

// Zeros in place of the second numbers, whatever they are.
static inline PairVec firsts_of(PairVec pairs) { return (PairVec)_mm512_and_si512((__m512i)pairs, _mm512_set1_epi32(0xffff)); }

// Each lane's two products, which are rounded in between and in the processor's own manner: so whatever has to come out
// the same is summed up by this, in the same order.
static inline Vec add_products(Vec sum, PairVec a, PairVec b) { return (Vec)_mm512_dpbf16_ps((__m512)sum, a, b); }
#endif
