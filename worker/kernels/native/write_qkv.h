// What becomes of the product of tokens' queries, keys and values before attention: a phase of a step, as in phases.h.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>

#include "attention.h"
#include "pairs.h"
#include "phases.h"
#include "quads.h"

// Queries and keys normed and rotated where they stand; keys and values written to the cache.
struct WriteQkv {
    Shape shape;
    float *qkv;
    size_t stride;
    int num_tokens;
    const float *q_norm, *k_norm;  // null: none
    float eps;
    const float *cos, *sin;  // [positions][D], null: no rotation
    const int64_t *positions, *slots;
    Cache cache;

    // Of a prompt as many as share a block, usually, so that no two threads write to one line of it.
    int tokens_per_chunk() const { return num_tokens > 64 ? 16 : 2; }
    int num_chunks() const { return (num_tokens + tokens_per_chunk() - 1) / tokens_per_chunk(); }
};

static inline void norm_heads(const WriteQkv &write, float *head, int num, const float *norm) {
    const int dim = write.shape.head_dim;
    if (norm == nullptr) return;
    for (; num > 0; num--, head += dim) {
        const float share = inverse_rms(head, dim, write.eps);
        for (int i = 0; i < dim; i++) head[i] = head[i] * share * norm[i];
    }
}

// A token's queries and keys, one behind the other.
static inline void turn_heads(const WriteQkv &write, float *heads, int64_t position) {
    if (write.cos == nullptr) return;
    const int dim = write.shape.head_dim, half = dim / 2, whole = half / W * W;
    const float *cos = write.cos + position * dim, *sin = write.sin + position * dim;
    const float *const end = heads + (write.shape.heads + write.shape.kv_heads) * dim;
    for (int i = 0; i < whole; i += W) {
        const Vec cos_first = load(cos + i), sin_first = load(sin + i);
        const Vec cos_second = load(cos + i + half), sin_second = load(sin + i + half);
        for (float *head = heads + i; head < end; head += dim) {
            const Vec first = load(head), second = load(head + half);
            store(head, first * cos_first + second * sin_first);
            store(head + half, second * cos_second + first * sin_second);
        }
    }
    for (int i = whole; i < half; i++)
        for (float *head = heads + i; head < end; head += dim) {
            const float first = head[0], second = head[half];
            head[0] = first * cos[i] + second * sin[i];
            head[half] = second * cos[i + half] + first * sin[i + half];
        }
}

// One head's key and value of a token, to `place` and `offset` in the cache.
static inline void write_head(const WriteQkv &write, const float *key, const float *value, int64_t place, int offset) {
    const int dim = write.shape.head_dim;
    float *k = static_cast<float *>(write.cache.k) + place + offset;
    for (int d = 0; d < dim; d++) k[d * write.shape.block_size] = key[d];
    memcpy(static_cast<float *>(write.cache.v) + place + int64_t(offset) * dim, value, dim * sizeof(float));
}

// The same in bfloat16; key and value become what the cache has of them.
static inline void write_half_head(const WriteQkv &write, float *key, float *value, int64_t place, int offset) {
    const int dim = write.shape.head_dim;
    BFloat16 *k = static_cast<BFloat16 *>(write.cache.k) + place + offset;
    BFloat16 *v = static_cast<BFloat16 *>(write.cache.v) + place + int64_t(offset) * dim;
    for (int d = 0; d < dim; d += W, v += W) {
        BFloat16 some[W];
        store(some, load(key + d));
        for (int i = 0; i < W; i++) k[(d + i) * write.shape.block_size] = some[i];
        store(key + d, load(some));
        store(v, load(value + d));
        store(value + d, load(v));
    }
}

// The same in float8; key and value become what the cache has of them. `query` is the first of the heads that will see
// them: attention does not see NaN in such a cache, so where there is one, these get it from the query of the same token.
static inline void write_small_head(
    const WriteQkv &write, float *query, float *key, float *value, int64_t place, int offset) {
    const int dim = write.shape.head_dim;
    Float8 *k = static_cast<Float8 *>(write.cache.k) + place + offset;
    Float8 *v = static_cast<Float8 *>(write.cache.v) + place + int64_t(offset) * dim;
    bool is_finite = true;
    const auto rounded = [&](float &x, float scale) {
        const Float8 number = to_float8(x / scale);
        x = to_float(number) * scale;
        is_finite = is_finite && std::isfinite(x);
        return number;
    };
    for (int d = 0; d < dim; d++) {
        k[d * write.shape.block_size] = rounded(key[d], write.cache.k_scale);
        v[d] = rounded(value[d], write.cache.v_scale);
    }
    if (!is_finite)
        for (int h = 0; h < write.shape.group(); h++) query[h * dim] = NAN;
}

// The same in pairs. Each number of a value is written alone: its pair's other one is another token's, which another
// thread may write meanwhile.
static inline void write_paired_head(const WriteQkv &write, float *key, float *value, int64_t place, int offset) {
    const int dim = write.shape.head_dim, size = write.shape.block_size;
    Pair *k = static_cast<Pair *>(write.cache.k) + place / 2 + offset;
    Pair *v = static_cast<Pair *>(write.cache.v) + place / 2 + int64_t(offset / 2) * dim;
    for (int d = 0; d < dim; d += W) {
        Pair some[W / 2];
        BFloat16 *numbers = some[0].numbers, others[W];
        store(numbers, load(key + d));
        for (int i = 0; i < W / 2; i++) k[(d / 2 + i) * size] = some[i];
        store(key + d, load(numbers));
        store(others, load(value + d));
        for (int i = 0; i < W; i++) v[d + i].numbers[offset % 2] = others[i];
        store(value + d, load(others));
    }
}

// A token's key or value while it becomes whole numbers.
struct WholeHead {
    float *numbers;
    Quad *block;  // what its head has in the cache
};

// Of a token and a head that are `offset` in their block. Key and value become what the cache has of them.
static inline void write_key(const Shape &shape, const WholeHead &key, float inverse, float scale, int offset) {
    const int dim = shape.head_dim, size = shape.block_size;
    float *numbers = key.numbers;
    Quad *to = key.block + offset;
    for (int d = 0; d < dim; d += W, numbers += W, to += W / QUAD * size) {
        const IntVec whole = nearest(load(numbers) * inverse);
        store_apart(to, size, whole + KEY_ZERO);
        store(numbers, __builtin_convertvector(whole, Vec) * scale);
    }
}

// Each number is written alone, as above.
static inline void write_value(const Shape &shape, const WholeHead &value, float inverse, float scale, int offset) {
    const int dim = shape.head_dim;
    float *numbers = value.numbers;
    Quad *to = value.block + offset / QUAD * dim;
    for (int d = 0; d < dim; d += W, numbers += W, to += W) {
        const IntVec whole = nearest(load(numbers) * inverse);
        store_number(to, offset % QUAD, whole);
        store(numbers, __builtin_convertvector(whole, Vec) * scale);
    }
}

// A token's keys and values in whole numbers, of two heads at a time. Where a number is not finite the scales of both are
// NaN, and so is what any query makes of them that sees the token.
static inline void write_whole_heads(const WriteQkv &write, float *keys, float *values, int64_t slot) {
    const Shape shape = write.shape;
    const int dim = shape.head_dim, offset = int(slot % shape.block_size), last = shape.kv_heads - 1;
    const size_t numbers = size_t(dim) * shape.block_size / QUAD;  // of a head in a block, before its scales
    Quad *k = static_cast<Quad *>(write.cache.k), *v = static_cast<Quad *>(write.cache.v);
    for (int h = 0; h <= last; h += 2) {
        const int pair[] = {h, std::min(h + 1, last)};
        IntVec most[TOGETHER];
        for (int i = 0; i < 2; i++) {
            most[2 * i] = largest_bits(keys + pair[i] * dim, dim);
            most[2 * i + 1] = largest_bits(values + pair[i] * dim, dim);
        }
        const WholeScale rounding(std::bit_cast<FourFloats>(largest_of(most)));
        for (int i = 0; i < 2 && h + i <= last; i++) {
            const size_t place = shape.place(slot / shape.block_size, pair[i]) / QUAD;
            const float key_scale = rounding.scale[2 * i], value_scale = rounding.scale[2 * i + 1];
            const float none = key_scale * 0.0f + value_scale * 0.0f;
            write_key(shape, {keys + pair[i] * dim, k + place}, rounding.inverse[2 * i], key_scale, offset);
            write_value(shape, {values + pair[i] * dim, v + place}, rounding.inverse[2 * i + 1], value_scale, offset);
            reinterpret_cast<float *>(k + place + numbers)[offset] = key_scale + none;
            reinterpret_cast<float *>(v + place + numbers)[offset] = value_scale + none;
        }
    }
}

static void run_write_qkv(const void *task, int chunk, int) {
    const WriteQkv &write = *static_cast<const WriteQkv *>(task);
    const Shape &shape = write.shape;
    const int dim = shape.head_dim, size = write.tokens_per_chunk();
    for (int token = chunk * size; token < std::min(write.num_tokens, (chunk + 1) * size); token++) {
        float *queries = write.qkv + token * write.stride, *keys = queries + shape.heads * dim;
        float *values = keys + shape.kv_heads * dim;
        norm_heads(write, queries, shape.heads, write.q_norm);
        norm_heads(write, keys, shape.kv_heads, write.k_norm);
        turn_heads(write, queries, write.positions[token]);
        const int64_t slot = write.slots[token];
        if (slot < 0) continue;
        if (shape.kept == Kept::int8) {
            write_whole_heads(write, keys, values, slot);
            continue;
        }
        const int offset = int(slot % shape.block_size);
        for (int h = 0; h < shape.kv_heads; h++, keys += dim, values += dim) {
            const int64_t place = shape.place(slot / shape.block_size, h);
            if (shape.kept == Kept::float8)
                write_small_head(write, queries + h * shape.group() * dim, keys, values, place, offset);
            else if (shape.is_paired())
                write_paired_head(write, keys, values, place, offset);
            else if (shape.kept == Kept::bfloat16)
                write_half_head(write, keys, values, place, offset);
            else
                write_head(write, keys, values, place, offset);
        }
    }
}
