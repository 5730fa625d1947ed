// Vectors of float in the compiler's own form, which GCC and Clang lower to the instruction set they are told.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
constexpr int W = 8;
#else
#error "AVX2 with FMA and F16C is the least that these kernels are for"
#endif
// A tile has two vectors of sums for each row: of 32 registers, or of 16, a few stay for what is multiplied.
constexpr int MAX_TILE_ROWS = W == 16 ? 12 : 6;

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t IntVec __attribute__((vector_size(W * 4)));
typedef int8_t ByteSizedVec __attribute__((vector_size(W)));

static inline Vec load(const float *from) {
    Vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline void store(float *to, Vec value) { memcpy(to, &value, sizeof value); }

// Past the caches, which neither have to get the line first nor to keep it; `to` begins a vector in memory. Other threads
// see it after `finish_streams`.
static inline void stream(float *to, Vec value) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, (__m512)value);
#else
    _mm256_stream_ps(to, (__m256)value);
#endif
}

static inline void finish_streams() { _mm_sfence(); }

constexpr int LINE = 64;  // bytes

// Asks for the line of this address, to be had from the second cache: with all of them asked for, blocks from all over
// memory came at 17 GB/s that way, and at 10 into the first cache.
static inline void ask_for(const void *line) { __builtin_prefetch(line, 0, 2); }

static inline Vec splat(float value) { return Vec{} + value; }

// The next W of `num` values, -inf where there are none.
static inline Vec load_some(const float *from, int num) {
    if (num >= W) return load(from);
    Vec value = splat(-INFINITY);
    memcpy(&value, from, num * sizeof(float));
    return value;
}

// 0, 1, 2 ...
static inline IntVec lanes() {
    IntVec value;
    for (int i = 0; i < W; i++) value[i] = i;
    return value;
}

// No NaN is.
static inline bool all_below(Vec value, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)value, _mm512_set1_ps(limit), _CMP_LT_OQ) == 0xffff;
#else
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)value, _mm256_set1_ps(limit), _CMP_LT_OQ)) == 0xff;
#endif
}

static inline Vec choose(IntVec condition, Vec yes, Vec no) { return condition ? yes : no; }

#if defined(__AVX512F__)
static inline float largest_of(Vec value) { return _mm512_reduce_max_ps((__m512)value); }

static inline Vec root_of(Vec value) { return (Vec)_mm512_sqrt_ps((__m512)value); }

static inline IntVec nearest(Vec value) { return (IntVec)_mm512_cvtps_epi32((__m512)value); }

static inline Vec nearest_whole(Vec value) { return (Vec)_mm512_roundscale_ps((__m512)value, _MM_FROUND_TO_NEAREST_INT); }
#else
static inline float largest_of(Vec value) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)value), _mm256_extractf128_ps((__m256)value, 1));
    const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}

static inline Vec root_of(Vec value) { return (Vec)_mm256_sqrt_ps((__m256)value); }

static inline IntVec nearest(Vec value) { return (IntVec)_mm256_cvtps_epi32((__m256)value); }

static inline Vec nearest_whole(Vec value) { return (Vec)_mm256_round_ps((__m256)value, _MM_FROUND_TO_NEAREST_INT); }
#endif

static inline float sum_of(Vec value) {
#if defined(__AVX512F__)
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)value), _mm512_extractf32x8_ps((__m512)value, 1));
#else
    const __m256 eight = (__m256)value;
#endif
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 pair = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

// The largest of `num` numbers without their signs, lane by lane. The bits of such floats are in the order of the floats,
// and what is not finite is above all others.
static inline IntVec largest_bits(const float *x, int num) {
    IntVec most = {};
    for (int i = 0; i < num; i += W) {
        const IntVec bits = (IntVec)load(x + i) & 0x7fffffff;
        most = most > bits ? most : bits;
    }
    return most;
}

// Of these each is the second, where one is NaN.
static inline Vec larger(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#endif
}

static inline Vec smaller(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return (Vec)_mm256_min_ps((__m256)a, (__m256)b);
#endif
}

// a * b + c, rounded once: of such an expression the compiler decides for itself, and not everywhere alike.
static inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

// x times 2^whole, where that is finite and not below 2^-126. NaN stays NaN.
static inline Vec scaled(Vec x, Vec whole) {
#if defined(__AVX512F__)
    return (Vec)_mm512_scalef_ps((__m512)x, (__m512)whole);
#else
    return (Vec)((IntVec)x + (nearest(whole) << 23));
#endif
}

// e^x within 2 units in the last place, for -87 <= x <= 88. NaN stays NaN.
static inline Vec exponential_within(Vec x) {
    // x = n ln 2 + r; adding 1.5 * 2^23 rounds n to a whole number.
    const Vec magic = splat(12582912.0f);
    const Vec n = x * 1.44269504088896341f + magic - magic;
    Vec r = x - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723e-6f;
    Vec poly = splat(1.9875691500e-4f);
    poly = poly * r + 1.3981999507e-3f;
    poly = poly * r + 8.3334519073e-3f;
    poly = poly * r + 4.1665795894e-2f;
    poly = poly * r + 1.6666665459e-1f;
    poly = poly * r + 5.0000001201e-1f;
    return scaled(poly * r * r + r + 1.0f, n);
}

// The same for all x <= 88; below -87 it is 0.
static inline Vec exponential(Vec x) {
    const Vec least = splat(-87.0f);
    const IntVec vanishes = x < least;
    return choose(vanishes, Vec{}, exponential_within(choose(vanishes, least, x)));
}

// `times` 2^x within 8e-5 of it, for x <= 112; hardly more than 0 below -126. NaN stays NaN.
static inline Vec power_of_two(Vec x, float times = 1.0f) {
    const Vec within = larger(splat(-126.0f), x), whole = nearest_whole(within), rest = within - whole;
    Vec poly = splat(5.51716691e-2f * times);
    poly = poly * rest + 2.42611122e-1f * times;
    poly = poly * rest + 6.93260985e-1f * times;
    poly = poly * rest + 9.99928074e-1f * times;
    return scaled(poly, whole);
}

// Within 1.5e-5 of it, for numbers that are neither below 2^-126 nor infinite.
static inline Vec logarithm_of_two(Vec x) {
    const IntVec bits = (IntVec)x;
    const Vec whole = __builtin_convertvector((bits >> 23) - 127, Vec), part = (Vec)((bits & 0x7fffff) | 0x3f800000);
    Vec poly = splat(4.39286278e-2f);
    poly = poly * part - 4.09475586e-1f;
    poly = poly * part + 1.61017755f;
    poly = poly * part - 3.52021884f;
    poly = poly * part + 5.06975632f;
    poly = poly * part - 2.79415368f;
    return poly + whole;
}
