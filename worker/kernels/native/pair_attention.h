// Attention over a cache of pairs (pairs.h), of queries and of weights that are rounded to bfloat16, too. A row's result is
// the same however its tokens came: every sum is of the same pairs in the same order, and pairs that a query does not see
// add zeros.
#pragma once

#include "attention.h"
#include "pairs.h"
#include "quad_attention.h"

#if defined(__AVX512BF16__)
constexpr int SCORED_QUERIES = 8, MIXED_QUERIES = 6, MIXED_VECTORS = 4;  // that tiles have sums of in registers

struct PairWork : ItemPlaces<Pair, 2> {
    Pair *queries;  // [queries][D / 2], times what makes scores exponents of two

    PairWork(const Attention &attention, const AttentionItem &item, const AttentionItem &next, float *scratch)
        : ItemPlaces(attention, item, next, scratch),
          queries(reinterpret_cast<Pair *>(total + most_queries() * (shape.head_dim + 2))) {
        round_queries();
    }

    float *scores_of(int i) const { return scores + i * (KEYS + W); }
    // In place of the scores: of two keys each.
    Pair *weights_of(int i) const { return reinterpret_cast<Pair *>(scores_of(i)); }
    const Pair *query_pairs(int i) const { return queries + i * (shape.head_dim / 2); }

    void round_queries() {
        const float scale = attention.score_scale() * float(M_LOG2E);
        for (int i = 0; i < num_queries; i++) {
            const float *from = query(i);
            auto *to = reinterpret_cast<BFloat16 *>(queries) + i * shape.head_dim;
            for (int d = 0; d < shape.head_dim; d += W) store(to + d, load(from + d) * scale);
        }
    }

    // Keys are read block by block, in pieces of memory that lie apart, so that a processor does not see them coming. This
    // is what is read AHEAD bytes of keys after `at`, if not values come first.
    const Pair *later_keys(int at, int first, int last) const {
        const int size = shape.block_size, block_bytes = size * shape.head_dim * int(sizeof(BFloat16));
        const int ahead = at + std::max(1, AHEAD / block_bytes) * size, past = ahead - (last + size - 1) / size * size;
        if (past < 0) return keys(item, ahead);
        if (last < item.last_key) return keys(item, std::min(last + past, item.last_key - 1));
        return keys(next, std::min(next.first_key + past, next.last_key - 1));
    }

    // Blocks are whole vectors of keys, some of which may be none. Meanwhile the keys' values are asked for: in the loop
    // that mixes them there is no time to.
    void score(int first, int last) {
        for (int at = first; at < last; at += W) {
            const Pair *tile = keys(item, at), *later = later_keys(at, first, last), *value = values(at);
            score_of<1, true>(std::min(SCORED_QUERIES, num_queries), 0, tile, at - first, later, value);
            for (int i = SCORED_QUERIES; i < num_queries; i += SCORED_QUERIES) {
                const int num = std::min(SCORED_QUERIES, num_queries - i);
                if (at < limit(i + num - 1)) score_of<1, false>(num, i, tile, at - first, later, value);
            }
        }
    }

    template <int R, bool asks>
    void score_of(int num, int i, const Pair *keys, int to, const Pair *later, const Pair *value) const {
        if constexpr (R < SCORED_QUERIES) {
            if (num > R) return score_of<R + 1, asks>(num, i, keys, to, later, value);
        }
        score_tile<R, asks>(i, keys, to, later, value);
    }

    template <int R, bool asks>
    void score_tile(int i, const Pair *keys, int to, const Pair *later, const Pair *value) const {
        Vec sums[R] = {};
        const Pair *query = query_pairs(i);
        const int half = shape.head_dim / 2;
        for (int d = 0; d < half; d++) {
            const PairVec key = load(keys + size_t(d) * shape.block_size);
            if (asks) ask_for(later + size_t(d) * shape.block_size), ask_for(value + d * W);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[r] = add_products(sums[r], key, splat(query[r * half + d]));
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) store(scores_of(i + r) + to, sums[r]);
    }

    void weigh(int first, int last) {
        for (int i = 0; i < num_queries; i++) weigh_query(i, first, last);
    }

    // Of all keys up to whole vectors of pairs; those that the query does not see weigh nothing.
    void weigh_query(int i, int first, int last) {
        const float *row = scores_of(i);
        Pair *weights = weights_of(i);
        const int seen = std::max(0, std::min(limit(i), last) - first), whole = seen / W * W;
        const __m512 none = (__m512)splat(-INFINITY);
        const __mmask16 is_seen = (1u << (seen - whole)) - 1;
        const __m512 rest = _mm512_mask_loadu_ps(none, is_seen, row + whole);
        __m512 most = _mm512_max_ps(rest, none);  // the second, where there is NaN
        for (int key = 0; key < whole; key += W) most = _mm512_max_ps((__m512)load(row + key), most);
        const float largest = largest_of((Vec)most), base = seen ? largest : 0.0f;
        const auto weight = [&](int key) {
            if (key < whole) return power_of_two(load(row + key) - base);
            return key > whole ? Vec{} : (Vec)_mm512_maskz_mov_ps(is_seen, (__m512)power_of_two((Vec)rest - base));
        };
        const PairVec ones = pairs_of(splat(1.0f), splat(1.0f));
        Vec sum = {};
        const auto put = [&](int key, Vec left, Vec right) {
            const PairVec pairs = pairs_of(left, right);
            store(weights + key / 2, pairs);
            sum = add_products(sum, pairs, ones);  // of what they are rounded to, so that shares add up to one
        };
        int key = 0;
        for (; key + 2 * W <= whole; key += 2 * W)
            put(key, power_of_two(load(row + key) - base), power_of_two(load(row + key + W) - base));
        for (; key < last - first; key += 2 * W) put(key, weight(key), weight(key + W));
        found[i * (shape.head_dim + 2) + shape.head_dim] = sum_of(sum);
        found[i * (shape.head_dim + 2) + shape.head_dim + 1] = largest * float(M_LN2);
    }

    void mix(int first, int last) {
        for (int i = 0; i < num_queries; i += MIXED_QUERIES) {
            const int num = std::min(MIXED_QUERIES, num_queries - i);
            const int end = std::max(first, std::min(last, limit(i + num - 1)));
            int d = 0;
            for (; d + MIXED_VECTORS * W <= shape.head_dim; d += MIXED_VECTORS * W)
                mix_of<1, MIXED_VECTORS>(num, i, first, end, d);
            for (; d < shape.head_dim; d += W) mix_of<1, 1>(num, i, first, end, d);
        }
    }

    template <int R, int N>
    void mix_of(int num, int i, int first, int end, int d) {
        if constexpr (R < MIXED_QUERIES) {
            if (num > R) return mix_of<R + 1, N>(num, i, first, end, d);
        }
        mix_tile<R, N>(i, first, end, d);
    }

    template <int R, int N>
    void mix_tile(int i, int first, int end, int d) {
        Vec sums[R][N] = {};
        for (int at = first; at < end;) {
            const int run = std::min(end - at, shape.block_size - at % shape.block_size);
            const Pair *value = values(at) + d, *weights = weights_of(i) + (at - first) / 2;
            for (int pair = 0; pair < run / 2; pair++)
                add_pair<false>(sums, value + pair * shape.head_dim, weights + pair);
            if (run % 2) add_pair<true>(sums, value + run / 2 * shape.head_dim, weights + run / 2);
            at += run;
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) store(found + (i + r) * (shape.head_dim + 2) + d + n * W, sums[r][n]);
    }

    // `is_odd`: the last of all keys alone, beside which there may be anything, whose weight is zero.
    template <bool is_odd, int R, int N>
    static inline __attribute__((always_inline)) void add_pair(
        Vec (&sums)[R][N], const Pair *value, const Pair *weights) {
        PairVec parts[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) parts[n] = is_odd ? firsts_of(load(value + n * W)) : load(value + n * W);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const PairVec weight = splat(weights[r * (KEYS + W)]);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) sums[r][n] = add_products(sums[r][n], parts[n], weight);
        }
    }
};
#endif

static inline auto attention_over(const Shape &shape) {
    if (shape.kept == Kept::float8) return attend_item<ItemWork<Float8>>;
    if (shape.kept == Kept::int8) return attend_item<QuadWork>;
    if (shape.kept == Kept::float32) return attend_item<ItemWork<float>>;
#if defined(__AVX512BF16__)
    if (shape.is_paired()) return attend_item<PairWork>;
#endif
    return attend_item<ItemWork<BFloat16>>;
}
