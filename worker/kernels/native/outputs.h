// What a product makes of a panel's sums: outputs of rows, the residual stream and its norm, or gated rows.
//
// A store may be to anything, for all that the compiler knows: what a loop over rows needs is in variables of its own.
// And these loops are inlined: what is handed to a function in pieces, and read whole, waits for its stores.
#pragma once

#include <algorithm>
#include <cmath>

#include "matrix.h"

struct Outputs {
    const float *sums, *shares;  // [rows][PANEL] and [rows]
    const float *bias;           // may be null

    // `width`: outputs from i on, of which there are fewer than a vector holds at the end of a matrix.
    Vec vector(int row, int i, int width = W) const {
        const Vec sum = load(sums + row * PANEL + i), share = splat(shares[row]);
        return bias == nullptr ? sum * share : multiply_add(sum, share, load_some(bias + i, width));
    }
    float one(int row, int i) const {
        const float sum = sums[row * PANEL + i];
        return bias == nullptr ? sum * shares[row] : std::fma(sum, shares[row], bias[i]);
    }
};

static inline const float *bias_at(const Matrix &matrix, int first) {
    return matrix.bias == nullptr ? nullptr : matrix.bias + first;
}

static inline int width_of(const Matrix &matrix, int panel) { return std::min(PANEL, matrix.out - panel * PANEL); }

// Calls write(where a vector of outputs goes, the vector).
template <typename Write>
[[gnu::always_inline]] static inline void each_vector(
    const Outputs &outputs, int num, float *out, size_t stride, Write write) {
    for (int r = 0; r < num; r++, out += stride)
        for (int i = 0; i < PANEL; i += W) write(out + i, outputs.vector(r, i));
}

// Adds a row's outputs to x, and what x is then times the norm's weights is `normed`; returns sums of squares of x.
static inline Vec add_normed(const Outputs &outputs, int row, float *x, const float *weights, float *normed) {
    const Vec left = load(x) + outputs.vector(row, 0), right = load(x + W) + outputs.vector(row, W);
    store(x, left);
    store(x + W, right);
    store(normed, left * load(weights));
    store(normed + W, right * load(weights + W));
    return left * left + right * right;
}

// Of a panel that is not full.
static inline Vec add_normed(
    const Outputs &outputs, int row, float *x, const float *weights, float *normed, int width) {
    Vec squares = {};
    for (int i = 0; i < width; i++) {
        x[i] += outputs.one(row, i);
        normed[i] = x[i] * weights[i];
        squares[0] += x[i] * x[i];
    }
    return squares;
}

// What becomes of a gate and its up: see ExpertsSpec (experts.py). Shared with Python (library.py), field by field.
enum class Curve : int32_t { silu, gelu, clamped };

struct Gate {
    Curve curve;
    float alpha, limit;  // of a clamped one
};

// x times the logistic function of `at`. Beyond 87 the exponential is nothing beside 1, or 1 nothing beside it.
static inline Vec logistic_share(Vec x, Vec at) {
    const Vec within = smaller(splat(87.0f), larger(splat(-87.0f), -at));
    return x / (exponential_within(within) + 1.0f);
}

template <Curve CURVE>
static inline Vec gated(const Gate &gate, Vec x, Vec up) {
    if constexpr (CURVE == Curve::silu) return logistic_share(x, x) * up;
    if constexpr (CURVE == Curve::gelu)  // by the tangent: 1 + tanh(z) is twice the logistic function of 2 z
        return logistic_share(x, (x + x * x * x * 0.044715f) * 1.5957691216057308f) * up;
    const Vec limit = splat(gate.limit);
    x = choose(x > limit, limit, x);
    up = choose(up > limit, limit, choose(up < -limit, -limit, up));
    return logistic_share(x, x * gate.alpha) * (up + 1.0f);
}

// A panel of gated rows: out [num][stride].
template <Curve CURVE>
[[gnu::always_inline]] static inline void write_gated_rows(
    const Gate gate, int num, const Outputs &gates, const Outputs &ups, float *out, size_t stride) {
    for (int r = 0; r < num; r++, out += stride)
        for (int i = 0; i < PANEL; i += W)
            store(out + i, gated<CURVE>(gate, gates.vector(r, i), ups.vector(r, i)));
}

[[gnu::always_inline]] static inline void write_gated(
    const Gate &gate, int num, const Outputs &gates, const Outputs &ups, float *out, size_t stride) {
    if (gate.curve == Curve::silu)
        write_gated_rows<Curve::silu>(gate, num, gates, ups, out, stride);
    else if (gate.curve == Curve::gelu)
        write_gated_rows<Curve::gelu>(gate, num, gates, ups, out, stride);
    else
        write_gated_rows<Curve::clamped>(gate, num, gates, ups, out, stride);
}
