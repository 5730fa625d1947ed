// Numbers of bfloat16, of which a cache may be: the upper half of a float.
#pragma once

#include "vector.h"

struct BFloat16 {
    uint16_t bits;
};

// W of them.
static inline Vec load(const BFloat16 *from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from))), 16);
#else
    return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))), 16);
#endif
}

// To the nearest, of two that are as near to the even one. Infinity and NaN stay what they are.
static inline BFloat16 to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return {uint16_t(bits >> 16 | 0x40)};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

static inline float to_float(BFloat16 number) {
    const uint32_t bits = uint32_t(number.bits) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
