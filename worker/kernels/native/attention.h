// Causal attention over a paged cache. Of each block a layer has keys [heads][D][block_size], so that a vector holds one
// component of W keys, and values [heads][block_size][D]; from a block to the next it is `block_stride` entries. These
// are floats, of bfloat16 (where a processor multiplies pairs of these, in another order: see pairs.h), of float8 with a
// scale for all of a layer's keys and one for its values, or whole numbers with scales of their own (quads.h).
//
// Keys are taken KEYS at a time, each time with a softmax of its own, and what was found is merged in their order. So a
// token's result depends on its context alone, and not on how the work was shared out.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "bfloat16.h"
#include "float8.h"
#include "rounding.h"

// What a cache has of a number. Shared with Python (library.py).
enum class Kept : int32_t { float32, bfloat16, float8, int8 };

constexpr int KEYS = 256;
constexpr int AHEAD = 8192;  // bytes from what is read to what is asked for
constexpr int TILE_QUERIES = 96;  // of a chunk of a prompt: tokens times heads that share keys
constexpr int SCORE_SUMS = W == 16 ? 8 : 12, MIX_SUMS = W == 16 ? 16 : 12;  // vectors that a tile has in registers

struct Shape {
    int heads, kv_heads, head_dim, block_size;
    int64_t block_stride;
    float scale;
    Kept kept;
    int group() const { return heads / kv_heads; }
    // Whether the cache is of pairs: of blocks that are whole vectors of keys.
    bool is_paired() const { return HAS_PAIRS && kept == Kept::bfloat16 && block_size % W == 0; }
    // What a head has in a block, of keys or of values: numbers, and behind whole ones a scale for each token.
    int64_t head_entries() const {
        return int64_t(head_dim + (kept == Kept::int8 ? sizeof(float) : 0)) * block_size;
    }
    int entry_bytes() const { return kept == Kept::float32 ? 4 : kept == Kept::bfloat16 ? 2 : 1; }
    // Where a layer's keys, or values, of this head in this block begin.
    int64_t place(int64_t block, int kv_head) const { return block * block_stride + kv_head * head_entries(); }
};

// Part of the work of one row and key head: some of its tokens over some of its keys.
struct AttentionItem {
    const int32_t *blocks;
    int kv_head;
    int first_token, num_tokens;
    int first_position;  // of the first token
    int first_key, last_key;
    int partial;  // number of its result, where others have the rest of the keys; -1: it has all
};

struct Merge {
    int first_partial, num_partials, kv_head, first_token, num_tokens;
};

// A layer's part of the cache, and what its numbers are multiplied by.
struct Cache {
    void *k, *v;
    float k_scale, v_scale;
};

struct Attention {
    Shape shape;
    const float *q;  // [tokens][stride]: the heads' queries side by side
    size_t stride;
    Cache cache;
    float *out;  // [tokens][heads * D]
    const std::vector<AttentionItem> *items;
    const std::vector<Merge> *merges;
    float *partials;          // [number][queries of an item][D + 2]: sum of values, then of weights, then the largest score
    int queries_per_partial;
    float *const *scratch;  // one for each thread
    int num_threads;
    RoundedRows rounded;  // what the next product reads, in place of `out`, if heads are whole blocks of it

    // Of what `load` makes of the cache.
    float unit() const { return shape.kept == Kept::float8 ? FLOAT8_UNIT : 1.0f; }
    float score_scale() const { return shape.scale * (cache.k_scale * unit()); }
    float value_scale() const { return cache.v_scale * unit(); }
};

static inline size_t attention_scratch(const Shape &shape) {
    const size_t queries = std::max(TILE_QUERIES, shape.group());
    return queries * (KEYS + W) + 2 * queries * (shape.head_dim + 2) + queries * (shape.head_dim / 2 + 2) + KEYS;
}

// Scores of N vectors of keys.
template <int R, int N, typename Entry>
static inline void score_tile(
    const float *const *q, const Entry *keys, const Entry *later, int key_stride, int dim, float *scores) {
    Vec total[R][N] = {};
    const int per_line = std::max(1, LINE / int(key_stride * sizeof(Entry))), last = per_line - 1;
    for (int d = 0; d < dim; d++) {
        Vec key[N];
        for (int n = 0; n < N; n++) key[n] = load(keys + size_t(d) * key_stride + n * W);
        if ((d & last) == 0) ask_for(later + size_t(d) * key_stride);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) total[r][n] += key[n] * q[r][d];
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) store(scores + r * (KEYS + W) + n * W, total[r][n]);
}

// `later`: what is read some time after these keys, and asked for now.
template <int R, int N, typename Entry>
static void scores_of(
    const float *const *q, int num, const Entry *keys, const Entry *later, int key_stride, int dim, float *scores) {
    if constexpr ((R + 1) * N <= SCORE_SUMS) {
        if (num > R) return scores_of<R + 1, N>(q, num, keys, later, key_stride, dim, scores);
    }
    score_tile<R, N>(q, keys, later, key_stride, dim, scores);
}

// Both are D values, their weights' sum, and the largest score, which is -inf where no key was seen.
static inline void merge_found(float *total, const float *part, int dim) {
    if (part[dim + 1] == -INFINITY && part[dim] == 0) return;
    const float most = std::max(total[dim + 1], part[dim + 1]);
    const float old_share = std::exp(total[dim + 1] - most), new_share = std::exp(part[dim + 1] - most);
    for (int d = 0; d <= dim; d++) total[d] = total[d] * old_share + part[d] * new_share;
    total[dim + 1] = most;
}

// Where an item's queries are, its keys and its values, in a cache each entry of which is of so many components of a key,
// and of as many keys' values; and where what is made of them goes.
template <typename Entry, int NUMBERS>
struct ItemPlaces {
    const Attention &attention;
    const AttentionItem &item, &next;  // the one that this thread will probably have next
    const Shape &shape;
    const int group;  // queries of a token
    int num_queries;
    float *scores, *found, *total;  // [queries][KEYS + W], [queries][D + 2] twice

    ItemPlaces(const Attention &attention, const AttentionItem &item, const AttentionItem &next, float *scratch)
        : attention(attention), item(item), next(next), shape(attention.shape),
          group(shape.group()), num_queries(item.num_tokens * group), scores(scratch),
          found(scores + most_queries() * (KEYS + W)), total(found + most_queries() * (shape.head_dim + 2)) {}

    // What a thread has room for.
    size_t most_queries() const { return std::max(TILE_QUERIES, group); }

    const float *query(int i) const {
        const int head = item.kv_head * group + i % group;
        return attention.q + (item.first_token + i / group) * attention.stride + size_t(head) * shape.head_dim;
    }

    // Keys that query i sees, counted from the beginning of the row.
    int limit(int i) const { return item.first_position + i / group + 1; }

    int64_t place(const AttentionItem &of, int position) const {
        return shape.place(of.blocks[position / shape.block_size], of.kv_head) / NUMBERS;
    }

    const Entry *keys(const AttentionItem &of, int position) const {
        return static_cast<const Entry *>(attention.cache.k) + place(of, position) + position % shape.block_size;
    }

    const Entry *values(int position) const {
        return static_cast<const Entry *>(attention.cache.v) + place(item, position) +
               position % shape.block_size / NUMBERS * shape.head_dim;
    }
};

template <typename Entry>
struct ItemWork : ItemPlaces<Entry, 1> {
    using Places = ItemPlaces<Entry, 1>;
    using Places::attention, Places::item, Places::next, Places::shape, Places::num_queries;
    using Places::keys, Places::limit, Places::query, Places::values;
    using Places::found, Places::scores, Places::total;
    using Places::Places;

    // Keys first ... last are read block by block, then their values, then the keys of what comes next: pieces of memory
    // that lie apart, so that a processor does not see them coming. This is what is read AHEAD bytes after `at`.
    const Entry *later(bool is_value, int at, int first, int last) const {
        const int size = shape.block_size, block_bytes = size * shape.head_dim * int(sizeof(Entry));
        const int num = (last - first + size - 1) / size;
        int block = (at - first) / size + (is_value ? num : 0) + std::max(1, AHEAD / block_bytes);
        const auto position = [&](int begin, int end) { return std::min(begin + block * size, end - 1); };
        if (block < num) return keys(item, position(first, last));
        block -= num;
        if (block < num) return values(position(first, last));
        block -= num;
        if (last < item.last_key) return keys(item, position(last, item.last_key));
        return keys(next, position(next.first_key, next.last_key));
    }

    // A tile of queries takes two vectors of keys together, where a block has them: of the widest vectors only if there
    // are few queries, which have too few sums with one for a processor to be busy. A tile that ends with a block writes
    // W scores all the same; the next one writes over those that are none.
    void score(int first, int last) {
        for (int at = first; at < last;) {
            const int room = shape.block_size - at % shape.block_size;
            const bool is_wide = (W == 8 || num_queries <= 4) && room >= 2 * W && at + 2 * W <= first + KEYS;
            const int num_keys = std::min(is_wide ? 2 * W : W, room), most = is_wide ? SCORE_SUMS / 2 : SCORE_SUMS;
            const Entry *tile = keys(item, at), *ahead = later(false, at, first, last);
            for (int i = 0; i < num_queries; i += most) {
                const int num = std::min(most, num_queries - i);
                const float *queries[SCORE_SUMS];
                for (int r = 0; r < num; r++) queries[r] = query(i + r);
                float *row = scores + i * (KEYS + W) + at - first;
                const auto score = is_wide ? scores_of<1, 2, Entry> : scores_of<1, 1, Entry>;
                score(queries, num, tile, ahead, shape.block_size, shape.head_dim, row);
            }
            at += num_keys;
        }
    }

    void weigh(int first, int last) {
        for (int i = 0; i < num_queries; i++) weigh_query(i, first, last);
    }

    void weigh_query(int i, int first, int last) {
        float *row = scores + i * (KEYS + W);
        const int seen = std::max(0, std::min(limit(i), last) - first), padded = (last - first + W - 1) / W * W;
        for (int key = seen; key < padded; key++) row[key] = -INFINITY;
        const float scale = attention.score_scale();
        Vec most = splat(-INFINITY);
        for (int key = 0; key < seen; key += W) most = larger(load(row + key) * scale, most);
        const float largest = largest_of(most);
        Vec sum = {};
        for (int key = 0; key < padded; key += W) {
            const Vec weight = exponential(load(row + key) * scale - (seen ? largest : 0.0f));
            store(row + key, weight);
            sum += weight;
        }
        found[i * (shape.head_dim + 2) + shape.head_dim] = sum_of(sum);
        found[i * (shape.head_dim + 2) + shape.head_dim + 1] = largest;
    }

    // Many queries are taken together where registers are few, so that values are read from the second cache less often.
    void mix(int first, int last) {
        const int most_vectors = W == 16 || num_queries <= 3 ? 4 : 2, most = MIX_SUMS / most_vectors;
        for (int i = 0; i < num_queries; i += most) {
            const int num = std::min(most, num_queries - i);
            const int end = std::max(first, std::min(last, limit(i + num - 1)));
            for (int d = 0; d < shape.head_dim; d += most_vectors * W)
                mix_queries(i, num, first, end, d, std::min(most_vectors, (shape.head_dim - d) / W));
        }
    }

    void mix_queries(int i, int num, int first, int end, int d, int vectors) {
        if (vectors == 4) return mix_of<1, 4>(i, num, first, end, d);
        if (vectors == 2) return mix_of<1, 2>(i, num, first, end, d);
        for (int r = 0; r < num; r++)
            for (int at = 0; at < vectors; at++) mix_tile<1, 1>(i + r, first, end, d + at * W);
    }

    template <int R, int N>
    void mix_of(int i, int num, int first, int end, int d) {
        if constexpr ((R + 1) * N <= MIX_SUMS) {
            if (num > R) return mix_of<R + 1, N>(i, num, first, end, d);
        }
        mix_tile<R, N>(i, first, end, d);
    }

    template <int R, int N>
    void mix_tile(int i, int first, int end, int d) {
        Vec sums[R][N] = {};
        for (int at = first; at < end;) {
            const int run = std::min(end - at, shape.block_size - at % shape.block_size);
            const Entry *value = values(at) + d;
            const ptrdiff_t ahead = i == 0 ? later(true, at, first, end) + d - value : 0;
            for (int key = at - first; key < at - first + run; key++, value += shape.head_dim) {
                Vec parts[N];
#pragma GCC unroll 4
                for (int n = 0; n < N; n++) {
                    parts[n] = load(value + n * W);
                    if (i == 0 && n * W * sizeof(Entry) % LINE == 0) ask_for(value + n * W + ahead);
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const float weight = scores[(i + r) * (KEYS + W) + key];
#pragma GCC unroll 4
                    for (int n = 0; n < N; n++) sums[r][n] += parts[n] * weight;
                }
            }
            at += run;
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) store(found + (i + r) * (shape.head_dim + 2) + d + n * W, sums[r][n]);
    }
};

static inline void write_query(const Attention &attention, size_t token, int head, const float *total) {
    const int dim = attention.shape.head_dim;
    float *out = attention.out + (token * attention.shape.heads + head) * dim;
    const float share = attention.value_scale() / total[dim];
    for (int d = 0; d < dim; d++) out[d] = total[d] * share;
}

// Of the heads of a token that share keys: they are blocks one behind the other.
static inline void round_queries(const Attention &attention, size_t token, int kv_head, const float *totals) {
    const Shape &shape = attention.shape;
    const int dim = shape.head_dim, size = shape.group() * dim, first = kv_head * size;
    alignas(64) float blocks[TOGETHER * ROW_BLOCK];
    for (int at = 0; at < size; at += TOGETHER * ROW_BLOCK) {
        const int num = std::min(TOGETHER, (size - at) / ROW_BLOCK);
        for (int b = 0; b < num; b++) {
            const int place = at + b * ROW_BLOCK;
            const float *total = totals + place / dim * (dim + 2);
            const float share = attention.value_scale() / total[dim];
            for (int i = 0; i < ROW_BLOCK; i++) blocks[b * ROW_BLOCK + i] = total[place % dim + i] * share;
        }
        attention.rounded.write_row(token, first + at, num, blocks);
    }
}

// totals [tokens][heads of the group][D + 2]
static inline void write_out(
    const Attention &attention, int kv_head, int first_token, int num_tokens, const float *totals) {
    const int group = attention.shape.group(), width = attention.shape.head_dim + 2;
    for (int token = first_token; token < first_token + num_tokens; token++, totals += group * width) {
        if (attention.rounded.numbers != nullptr)
            round_queries(attention, token, kv_head, totals);
        else
            for (int i = 0; i < group; i++) write_query(attention, token, kv_head * group + i, totals + i * width);
    }
}

// KEYS at a time, to `total`: the first of them at once, others by way of `found`.
template <typename Work>
static void attend_keys(Work &work) {
    const int first_key = work.item.first_key, last_key = work.item.last_key, dim = work.shape.head_dim, width = dim + 2;
    float *const apart = work.found;
    for (int first = first_key; first < last_key; first += KEYS) {
        const int last = std::min(first + KEYS, last_key);
        work.found = first == first_key ? work.total : apart;
        work.score(first, last);
        work.weigh(first, last);
        work.mix(first, last);
        if (first == first_key) continue;
        for (int i = 0; i < work.num_queries; i++) merge_found(work.total + i * width, apart + i * width, dim);
    }
}

template <typename Work>
static void attend_item(const void *task, int chunk, int thread) {
    const Attention &attention = *static_cast<const Attention *>(task);
    const int last = int(attention.items->size()) - 1, width = attention.shape.head_dim + 2;
    const AttentionItem &item = (*attention.items)[chunk];
    const AttentionItem &next = (*attention.items)[std::min(chunk + attention.num_threads, last)];
    Work work(attention, item, next, attention.scratch[thread]);
    if (item.partial >= 0) work.total = attention.partials + size_t(item.partial) * attention.queries_per_partial * width;
    attend_keys(work);
    if (item.partial < 0) write_out(attention, item.kv_head, item.first_token, item.num_tokens, work.total);
}

static void merge_partials(const void *task, int chunk, int) {
    const Attention &attention = *static_cast<const Attention *>(task);
    const Merge &merge = (*attention.merges)[chunk];
    const int width = attention.shape.head_dim + 2;
    const size_t size = size_t(attention.queries_per_partial) * width;
    float *first = attention.partials + merge.first_partial * size;
    for (int i = 0; i < merge.num_tokens * attention.shape.group(); i++)
        for (int part = 1; part < merge.num_partials; part++)
            merge_found(first + i * width, first + part * size + i * width, attention.shape.head_dim);
    write_out(attention, merge.kv_head, merge.first_token, merge.num_tokens, first);
}
