// Attention over a cache of quads (quads.h). Queries are rounded to 8 bits, too, and weights, times the scales of their
// values, to 15: so all products and their sums are whole numbers, and exact. A row's result is the same however its tokens
// came: what it sums up in floats is in an order of its own, and what a query does not see weighs nothing, whatever it is.
#pragma once

#include "attention.h"
#include "quads.h"

constexpr int QUAD_SCORED = W == 16 ? 8 : 4;  // queries that tiles have sums of in registers
constexpr int QUAD_WEIGHED = 4;  // of a token, side by side
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

    // W tokens side by side in a block: where its head has the block, in keys as in values, and which of its tokens they are.
    struct Spot {
        int64_t block;
        int offset;
    };
    Spot spots[2 * KEYS / W];  // of those keys that are taken together, then of what this thread reads next
    int num_spots;

    QuadWork(const Attention &attention, const AttentionItem &item, const AttentionItem &next, float *scratch)
        : ItemPlaces(attention, item, next, scratch),
          queries(reinterpret_cast<QueryQuad *>(total + most_queries() * (shape.head_dim + 2))),
          units(reinterpret_cast<Unit *>(queries + most_queries() * (shape.head_dim / QUAD))),
          per_value(reinterpret_cast<float *>(units + most_queries())) {
        round_queries();
    }

    float *scores_of(int i) const { return scores + i * (KEYS + W); }
    // In place of the scores: of four keys each.
    WeightQuad *weights_of(int i) const { return reinterpret_cast<WeightQuad *>(scores_of(i)); }

    const Quad *keys(const Spot &spot) const {
        return static_cast<const Quad *>(attention.cache.k) + spot.block + spot.offset;
    }
    const Quad *values(const Spot &spot) const {
        return static_cast<const Quad *>(attention.cache.v) + spot.block + spot.offset / QUAD * shape.head_dim;
    }
    // Those of the tokens, behind the block's numbers.
    const float *scales(const void *cache, const Spot &spot) const {
        const Quad *block = static_cast<const Quad *>(cache) + spot.block;
        return reinterpret_cast<const float *>(block + shape.block_size * shape.head_dim / QUAD) + spot.offset;
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

    // Of keys first ... last of an item, as many as there is room for; returns where the next one goes.
    Spot *put_spots(const AttentionItem &of, int first, int last, Spot *to, const Spot *end) const {
        int block = first / shape.block_size, offset = first % shape.block_size;
        for (; first < last && to < end; first += W) {
            *to++ = {shape.place(of.blocks[block], of.kv_head) / QUAD, offset};
            offset += W;
            if (offset == shape.block_size) offset = 0, block++;
        }
        return to;
    }

    // As many behind those of keys first ... last, some of them again where less is left to read.
    void find_spots(int first, int last) {
        Spot *to = put_spots(item, first, last, spots, spots + KEYS / W);
        num_spots = int(to - spots);
        const Spot *end = to + num_spots;
        if (last < item.last_key)
            to = put_spots(item, last, item.last_key, to, end);
        else
            to = put_spots(next, next.first_key, next.last_key, to, end);
        for (; to < end; to++) *to = to[-1];
    }

    // Blocks are whole vectors of keys, some of which may be none. Two are taken together, so that there are sums enough
    // for a processor to be busy with few queries. They lie apart, so that it does not see them coming: meanwhile values of
    // what is read next are asked for, and its keys where these values are mixed.
    void score(int first, int last) {
        find_spots(first, last);
        int at = 0;
        for (; at + 1 < num_spots; at += 2) score_spots<2>(at, first);
        if (at < num_spots) score_spots<1>(at, first);
    }

    // A score comes with the scale of its key's value, so that what a value weighs, times that scale, is rounded beside the
    // most that any does.
    template <int N>
    void score_spots(int at, int first) {
        Tile<N> tile;
        tile.to = at * W;
        for (int n = 0; n < N; n++) {
            const Spot &spot = spots[at + n], &later = spots[at + n + num_spots];
            ask_for(scales(attention.cache.v, later));
            const Vec value_scales = load(scales(attention.cache.v, spot));
            store(per_value + (at + n) * W, 1.0f / value_scales);
            tile.scales[n] = load(scales(attention.cache.k, spot));
            tile.logs[n] = logarithm_of_two(value_scales);
            tile.keys[n] = keys(spot), tile.later[n] = values(later);
        }
        score_of<1, N, true>(std::min(QUAD_SCORED, num_queries), 0, tile);
        for (int i = QUAD_SCORED; i < num_queries; i += QUAD_SCORED) {
            const int num = std::min(QUAD_SCORED, num_queries - i);
            if (first + tile.to < limit(i + num - 1)) score_of<1, N, false>(num, i, tile);
        }
    }

    template <int N>
    struct Tile {
        const Quad *keys[N], *later[N];  // later: values
        Vec scales[N], logs[N];  // of keys; of the scales of values
        int to;
    };

    template <int R, int N, bool asks>
    void score_of(int num, int i, const Tile<N> &tile) const {
        if constexpr (R < QUAD_SCORED) {
            if (num > R) return score_of<R + 1, N, asks>(num, i, tile);
        }
        score_tile<R, N, asks>(i, tile);
    }

    template <int R, int N, bool asks>
    void score_tile(int i, const Tile<N> &tile) const {
        ScoreSums sums[R][N];
        const int quarter = shape.head_dim / QUAD, size = shape.block_size;
        const QueryQuad *query = queries + i * quarter;
        for (int d = 0; d < quarter; d++) {
            BitVec keys[N];
            for (int n = 0; n < N; n++) {
                keys[n] = load(tile.keys[n] + size_t(d) * size);
                if (asks) ask_for(tile.later[n] + d * W);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                for (int n = 0; n < N; n++) sums[r][n].add(keys[n], query[r * quarter + d]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const Unit unit = units[i + r];
            for (int n = 0; n < N; n++) {
                const Vec score = floats_of(sums[r][n].sums - uint32_t(unit.shift)) * unit.scale;
                store(scores_of(i + r) + tile.to + n * W, score * tile.scales[n] + tile.logs[n]);
            }
        }
    }

    static Vec floats_of(BitVec whole) { return __builtin_convertvector((IntVec)whole, Vec); }

    void weigh(int first, int last) {
        for (int i = 0; i < num_queries; i += group) {
            const int seen = std::max(0, std::min(limit(i), last) - first);
            for (int at = 0; at < group; at += QUAD_WEIGHED)
                weigh_of<1>(std::min(QUAD_WEIGHED, group - at), i + at, seen, last - first);
        }
    }

    template <int R>
    void weigh_of(int num, int i, int seen, int all) {
        if constexpr (R < QUAD_WEIGHED) {
            if (num > R) return weigh_of<R + 1>(num, i, seen, all);
        }
        weigh_queries<R>(i, seen, all);
    }

    // Of queries that see the first `seen` keys of `all`, which are taken up to whole vectors: others weigh nothing. The
    // weights' sums are without the scales of values.
    template <int R>
    void weigh_queries(int i, int seen, int all) {
        const int whole = seen / W * W, width = shape.head_dim + 2;
        const IntVec is_seen = lanes() < seen - whole;
        const Vec none = splat(-INFINITY);
        float *rows[R], *to[R], largest[R];
        Vec most[R], base[R], sum[R] = {};
        for (int r = 0; r < R; r++) {
            rows[r] = scores_of(i + r), to[r] = found + (i + r) * width + shape.head_dim;
            most[r] = larger(choose(is_seen, load(rows[r] + whole), none), none);  // the second, where there is NaN
        }
        for (int key = 0; key < whole; key += W)
            for (int r = 0; r < R; r++) most[r] = larger(load(rows[r] + key), most[r]);
        for (int r = 0; r < R; r++) largest[r] = largest_of(most[r]), base[r] = splat(seen ? largest[r] : 0.0f);
        const auto weight = [&](int r, int key) { return power_of_two(load(rows[r] + key) - base[r], MOST_WEIGHT); };
        const auto put = [&](int r, int key, Vec weight, Vec per_value) {
            sum[r] += weight * per_value;
            store(reinterpret_cast<WeightQuad *>(rows[r]) + key / QUAD, nearest(weight));
        };
        int key = 0;
        for (; key < whole; key += W) {
            const Vec share = load(per_value + key);
            for (int r = 0; r < R; r++) put(r, key, weight(r, key), share);
        }
        if (seen > whole) {
            const Vec share = choose(is_seen, load(per_value + key), Vec{});
            for (int r = 0; r < R; r++) put(r, key, choose(is_seen, weight(r, key), Vec{}), share);
            key += W;
        }
        for (; key < all; key += W)
            for (int r = 0; r < R; r++) store(reinterpret_cast<WeightQuad *>(rows[r]) + key / QUAD, IntVec{});
        for (int r = 0; r < R; r++) to[r][0] = sum_of(sum[r]), to[r][1] = largest[r] * float(M_LN2);
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
        i == 0 ? mix_tile<R, N, true>(i, first, end, d) : mix_tile<R, N, false>(i, first, end, d);
    }

    template <int R, int N, bool asks>
    void mix_tile(int i, int first, int end, int d) {
        constexpr size_t stride = (KEYS + W) * sizeof(float) / sizeof(WeightQuad);
        MixedSums sums[R][N];
        const Spot *spot = spots;
        for (int at = first; at < end; at += W, spot++) {
            const Quad *value = values(*spot) + d, *later = keys(spot[num_spots]) + d / QUAD * shape.block_size;
            const WeightQuad *weights = weights_of(i) + (at - first) / QUAD;
            if (asks && d == 0) ask_for(scales(attention.cache.k, spot[num_spots]));
            for (int left = std::min(W, end - at); left > 0; left -= QUAD, value += shape.head_dim, weights++) {
                BitVec parts[N];
#pragma GCC unroll 4
                for (int n = 0; n < N; n++) {
                    parts[n] = load(value + n * W);
                    if (asks) ask_for(later), later += shape.block_size;
                }
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                    for (int n = 0; n < N; n++) sums[r][n].add(parts[n], weights[r * stride]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
                store(found + (i + r) * (shape.head_dim + 2) + d + n * W, floats_of(sums[r][n].total()));
    }
};
