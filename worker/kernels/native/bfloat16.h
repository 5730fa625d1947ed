// Numbers of bfloat16, of which a cache may be: the upper half of a float.
#pragma once

#include "vector.h"

struct BFloat16 {
    uint16_t bits;
};

// Whether the processor multiplies pairs of them.
#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif

// W of them.
static inline Vec load(const BFloat16 *from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from))), 16);
#else
    return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))), 16);
#endif
}

// To the nearest, of two that are as near to the even one. Infinity and NaN stay what they are.
static inline void store(BFloat16 *to, Vec value) {
    const IntVec bits = (IntVec)value, is_nan = value != value;
    const IntVec nearest = bits + 0x7fff + ((bits >> 16) & 1);
    const IntVec upper = (is_nan ? bits | 0x400000 : nearest) >> 16;
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm512_cvtepi32_epi16((__m512i)upper));
#else
    // Packing takes numbers with a sign, which these are, and goes half by half of a vector.
    const __m256i packed = _mm256_packs_epi32((__m256i)upper, (__m256i)upper);
    const __m128i low = _mm256_castsi256_si128(packed), high = _mm256_extracti128_si256(packed, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm_unpacklo_epi64(low, high));
#endif
}
