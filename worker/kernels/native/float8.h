// Numbers of float8 (e4m3, without infinities), of which a cache may be.
#pragma once

#include <algorithm>
#include <cmath>

#include "vector.h"

struct Float8 {
    uint8_t bits;
};

constexpr float MAX_FLOAT8 = 448.0f;
constexpr uint8_t NAN_FLOAT8 = 0x7f;
// What is loaded is too small by this: sign, exponent and fraction stand where half precision has its own, whose bias is
// 8 more. Whoever sums up products multiplies once at the end.
constexpr float FLOAT8_UNIT = 256.0f;

// W of them over FLOAT8_UNIT, exactly, but for NaN, which is 480 here: see write_small_head.
static inline Vec load(const Float8 *from) {
#if defined(__AVX512F__)
    const __m256i bits = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
    return (Vec)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(bits, 7), _mm256_set1_epi16(int16_t(0xbf80))));
#else
    const __m128i bits = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
    return (Vec)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(bits, 7), _mm_set1_epi16(int16_t(0xbf80))));
#endif
}

// To the nearest, of two that are as near to the even one. What is beyond the range becomes its end; what is not finite
// becomes NaN.
static inline Float8 to_float8(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint8_t sign = bits >> 24 & 0x80;
    if (!std::isfinite(value)) return {uint8_t(sign | NAN_FLOAT8)};
    const float size = std::min(std::fabs(value), MAX_FLOAT8);
    constexpr float SMALLEST_NORMAL = 0x1p-6f, STEP_BELOW = 0x1p-9f;
    if (size < SMALLEST_NORMAL) return {uint8_t(sign | uint8_t(std::nearbyint(size / STEP_BELOW)))};
    memcpy(&bits, &size, sizeof bits);
    bits += 0x7ffff + (bits >> 20 & 1);
    return {uint8_t(sign | ((bits >> 20) - (120 << 3)))};
}

static inline float to_float(Float8 number) {
    const int exponent = number.bits >> 3 & 15, fraction = number.bits & 7;
    if ((number.bits & 0x7f) == NAN_FLOAT8) return NAN;
    const float size = exponent == 0 ? std::ldexp(float(fraction), -9) : std::ldexp(float(8 + fraction), exponent - 10);
    return number.bits & 0x80 ? -size : size;
}
