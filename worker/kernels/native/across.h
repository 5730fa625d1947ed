// Sums and largest numbers across the lanes of four vectors at once, which takes little longer than of one: lane i of what
// is found is of vector i. A sum is taken in the order of sum_of.
#pragma once

#include <bit>

#include "vector.h"

constexpr int TOGETHER = 4;

typedef float FourFloats __attribute__((vector_size(16)));
typedef int32_t FourInts __attribute__((vector_size(16)));

// Of floats, or of whole numbers in their registers.
struct AddFloats {
    static __m256 of(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
    static __m128 of(__m128 a, __m128 b) { return _mm_add_ps(a, b); }
};
struct AddInts {
    static __m256 of(__m256 a, __m256 b) { return (__m256)_mm256_add_epi32((__m256i)a, (__m256i)b); }
    static __m128 of(__m128 a, __m128 b) { return (__m128)_mm_add_epi32((__m128i)a, (__m128i)b); }
};
struct LargerInts {
    static __m256 of(__m256 a, __m256 b) { return (__m256)_mm256_max_epi32((__m256i)a, (__m256i)b); }
    static __m128 of(__m128 a, __m128 b) { return (__m128)_mm_max_epi32((__m128i)a, (__m128i)b); }
};

// Four lanes of what is left of a vector.
template <typename Op>
static inline __m128 folded(Vec value) {
#if defined(__AVX512F__)
    const __m256 half = Op::of(_mm512_castps512_ps256((__m512)value), _mm512_extractf32x8_ps((__m512)value, 1));
#else
    const __m256 half = (__m256)value;
#endif
    return Op::of(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

template <typename Op>
static inline __m128 across(const Vec (&values)[TOGETHER]) {
    const __m128 a = folded<Op>(values[0]), b = folded<Op>(values[1]);
    const __m128 c = folded<Op>(values[2]), d = folded<Op>(values[3]);
    const __m128 left = Op::of(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    const __m128 right = Op::of(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    return Op::of(_mm_movelh_ps(left, right), _mm_movehl_ps(right, left));
}

static inline FourFloats sums_of(const Vec (&values)[TOGETHER]) { return (FourFloats)across<AddFloats>(values); }

static inline FourInts sums_of(const IntVec (&values)[TOGETHER]) {
    return (FourInts)across<AddInts>({(Vec)values[0], (Vec)values[1], (Vec)values[2], (Vec)values[3]});
}

static inline FourInts largest_of(const IntVec (&values)[TOGETHER]) {
    return (FourInts)across<LargerInts>({(Vec)values[0], (Vec)values[1], (Vec)values[2], (Vec)values[3]});
}

// Of one.
static inline int32_t sum_of(IntVec value) { return sums_of({value, value, value, value})[0]; }
static inline int32_t largest_of(IntVec value) { return largest_of({value, value, value, value})[0]; }

// The largest of `num` numbers without its sign; what is not finite is above all others.
static inline float largest_size(const float *x, int num) {
    return std::bit_cast<float>(largest_of(largest_bits(x, num)));
}
