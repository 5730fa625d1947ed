// Attention over a cache of quads (quads.h). Queries are rounded to 8 bits, too, and weights, times the scales of their
// values, to 15: so all products and their sums are whole numbers, and exact. A row's result is the same however its tokens
// came: what it sums up in floats is in an order of its own, and what a query does not see weighs nothing, whatever it is.
#pragma once

#include "attention.h"
#include "quads.h"

constexpr int QUAD_SCORED = W == 16 ? 8 : 4;  // queries that tiles have sums of in registers
constexpr int QUAD_MIXED = 3, QUAD_VECTORS = W == 16 ? 4 : 2;

struct QuadWork : ItemPlaces<Quad, QUAD> {
    // What a query's sums are too large by, as numbers of keys are, and what makes scores of them: exponents of two.
    struct Unit {
        int32_t shift;
        float scale;
    };
    QueryQuad *queries;  // [queries][D / 4]
    Unit *units;
    float *per_value;  // [KEYS]: one over the scales of the keys' values

    QuadWork(const Attention &attention, const AttentionItem &item, const AttentionItem &next, float *scratch)
        : ItemPlaces(attention, item, next, scratch),
          queries(reinterpret_cast<QueryQuad *>(total + most_queries() * (shape.head_dim + 2))),
          units(reinterpret_cast<Unit *>(queries + most_queries() * (shape.head_dim / QUAD))),
          per_value(reinterpret_cast<float *>(units + most_queries())) {
        round_queries();
    }

    struct Key {
        const AttentionItem &of;
        int position;
    };

    float *scores_of(int i) const { return scores + i * (KEYS + W); }
    // In place of the scores: of four keys each.
    WeightQuad *weights_of(int i) const { return reinterpret_cast<WeightQuad *>(scores_of(i)); }

    // Those of a token and of the others behind it in its block.
    const float *scales(const void *cache, const Key &key) const {
        const int size = shape.block_size;
        const Quad *block = static_cast<const Quad *>(cache) + place(key.of, key.position);
        return reinterpret_cast<const float *>(block + size * shape.head_dim / QUAD) + key.position % size;
    }

    void round_queries() {
        const int dim = shape.head_dim;
        for (int i = 0; i < num_queries; i++) {
            const float *from = query(i);
            const WholeScale rounding(largest_size(from, dim));
            QueryQuad *to = queries + i * (dim / QUAD);
            IntVec sum = {};
            for (int d = 0; d < dim; d += W) {
                const IntVec whole = nearest(load(from + d) * rounding.inverse);
                store(to + d / QUAD, whole);
                sum += whole;
            }
            units[i] = {sum_of(sum) * KEY_ZERO, rounding.scale * attention.score_scale() * float(M_LOG2E)};
        }
    }

    // See PairWork.
    Key later_key(int at, int first, int last) const {
        const int size = shape.block_size, block_bytes = int(shape.head_entries());
        const int ahead = at + std::max(1, AHEAD / block_bytes) * size, past = ahead - (last + size - 1) / size * size;
        if (past < 0) return {item, ahead};
        if (last < item.last_key) return {item, std::min(last + past, item.last_key - 1)};
        return {next, std::min(next.first_key + past, next.last_key - 1)};
    }

    // Blocks are whole vectors of keys, some of which may be none. A score comes with the scale of its key's value, so that
    // what a value weighs, times that scale, is rounded beside the most that any does. Meanwhile the keys' values are asked
    // for: in the loop that mixes them there is no time to.
    void score(int first, int last) {
        for (int at = first; at < last; at += W) {
            const Key later = later_key(at, first, last);
            ask_for(scales(attention.cache.k, later));
            ask_for(scales(attention.cache.v, later));
            const Vec key_scales = load(scales(attention.cache.k, {item, at}));
            const Vec value_scales = load(scales(attention.cache.v, {item, at}));
            store(per_value + at - first, 1.0f / value_scales);
            const Tile tile{
                keys(item, at), keys(later.of, later.position), values(at),
                key_scales,     logarithm_of_two(value_scales),         at - first};
            score_of<1, true>(std::min(QUAD_SCORED, num_queries), 0, tile);
            for (int i = QUAD_SCORED; i < num_queries; i += QUAD_SCORED) {
                const int num = std::min(QUAD_SCORED, num_queries - i);
                if (at < limit(i + num - 1)) score_of<1, false>(num, i, tile);
            }
        }
    }

    struct Tile {
        const Quad *keys, *later, *values;
        Vec scales, logs;  // of keys; of the scales of values
        int to;
    };

    template <int R, bool asks>
    void score_of(int num, int i, const Tile &tile) const {
        if constexpr (R < QUAD_SCORED) {
            if (num > R) return score_of<R + 1, asks>(num, i, tile);
        }
        score_tile<R, asks>(i, tile);
    }

    template <int R, bool asks>
    void score_tile(int i, const Tile &tile) const {
        ScoreSums sums[R];
        const int quarter = shape.head_dim / QUAD;
        const QueryQuad *query = queries + i * quarter;
        for (int d = 0; d < quarter; d++) {
            const BitVec key = load(tile.keys + size_t(d) * shape.block_size);
            if (asks) ask_for(tile.later + size_t(d) * shape.block_size), ask_for(tile.values + d * W);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[r].add(key, query[r * quarter + d]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const Unit unit = units[i + r];
            const Vec score = floats_of(sums[r].sums - uint32_t(unit.shift)) * unit.scale;
            store(scores_of(i + r) + tile.to, score * tile.scales + tile.logs);
        }
    }

    static Vec floats_of(BitVec whole) { return __builtin_convertvector((IntVec)whole, Vec); }

    // Of all keys up to whole vectors; those that the query does not see weigh nothing. The weights' sum is without the
    // scales of values.
    void weigh(int i, int first, int last) {
        float *row = scores_of(i);
        const int seen = std::max(0, std::min(limit(i), last) - first), whole = seen / W * W;
        const IntVec is_seen = lanes() < seen - whole;
        const Vec none = splat(-INFINITY), rest = choose(is_seen, load(row + whole), none);
        Vec most = larger(rest, none);  // the second, where there is NaN
        for (int key = 0; key < whole; key += W) most = larger(load(row + key), most);
        const float largest = largest_of(most), base = seen ? largest : 0.0f;
        Vec sum = {};
        const auto put = [&](int key, Vec weight, Vec per_value) {
            sum += weight * per_value;
            store(weights_of(i) + key / QUAD, nearest(weight));
        };
        int key = 0;
        for (; key < whole; key += W) put(key, power_of_two(load(row + key) - base, MOST_WEIGHT), load(per_value + key));
        if (seen > whole) {
            const Vec weight = choose(is_seen, power_of_two(rest - base, MOST_WEIGHT), Vec{});
            put(key, weight, choose(is_seen, load(per_value + key), Vec{}));
            key += W;
        }
        for (; key < last - first; key += W) store(weights_of(i) + key / QUAD, IntVec{});
        found[i * (shape.head_dim + 2) + shape.head_dim] = sum_of(sum);
        found[i * (shape.head_dim + 2) + shape.head_dim + 1] = largest * float(M_LN2);
    }

    void mix(int first, int last) {
        for (int i = 0; i < num_queries; i += QUAD_MIXED) {
            const int num = std::min(QUAD_MIXED, num_queries - i);
            const int end = std::max(first, std::min(last, limit(i + num - 1)));
            int d = 0;
            for (; d + QUAD_VECTORS * W <= shape.head_dim; d += QUAD_VECTORS * W)
                mix_of<1, QUAD_VECTORS>(num, i, first, end, d);
            for (; d < shape.head_dim; d += W) mix_of<1, 1>(num, i, first, end, d);
        }
    }

    template <int R, int N>
    void mix_of(int num, int i, int first, int end, int d) {
        if constexpr (R < QUAD_MIXED) {
            if (num > R) return mix_of<R + 1, N>(num, i, first, end, d);
        }
        mix_tile<R, N>(i, first, end, d);
    }

    template <int R, int N>
    void mix_tile(int i, int first, int end, int d) {
        constexpr size_t stride = (KEYS + W) * sizeof(float) / sizeof(WeightQuad);
        MixedSums sums[R][N];
        for (int at = first; at < end;) {
            const int run = std::min(end - at, shape.block_size - at % shape.block_size);
            const Quad *value = values(at) + d;
            const WeightQuad *weights = weights_of(i) + (at - first) / QUAD;
            for (int quad = 0; quad < (run + QUAD - 1) / QUAD; quad++, value += shape.head_dim, weights++) {
                BitVec parts[N];
#pragma GCC unroll 4
                for (int n = 0; n < N; n++) parts[n] = load(value + n * W);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                    for (int n = 0; n < N; n++) sums[r][n].add(parts[n], weights[r * stride]);
            }
            at += run;
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
                store(found + (i + r) * (shape.head_dim + 2) + d + n * W, floats_of(sums[r][n].total()));
    }
};
