// From logits to tokens: what ChooseKernel promises (sampling.py), computed as torch's kernel does (torch/sample.py).
//
// One pass finds the best logit of each chunk of the vocabulary. A row that is drawn computes its limit, the least scaled
// logit that stays, looking only at chunks that reach it; then it runs the race, over chunks, and in the one that wins.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "vector.h"

constexpr int CHUNK = 256;  // tokens that are drawn from together: random bits depend on it (sampling.py)
constexpr int CHUNKS_PER_PIECE = 32;
constexpr double GREEDY_TEMPERATURE = 1e-5;

// Parameters of a slot, as sampling.py packs them.
struct DrawIntegers {
    int64_t top_k;
    uint64_t seed;
    int64_t num_prompt_tokens;
};

struct DrawFloats {
    double temperature, top_p, min_p, penalties[3];
};

struct Choose {
    const float *logits;
    int64_t stride;
    const int64_t *rows;  // null: the first ones
    int num_rows, vocabulary;
    const DrawIntegers *integers;
    const DrawFloats *floats;  // null: all rows are greedy
    const int64_t *slots, *positions;
    float *bests;  // [rows][chunks], +inf where a logit is NaN
    int64_t *ids;

    int chunks() const { return (vocabulary + CHUNK - 1) / CHUNK; }
    int pieces() const { return (chunks() + CHUNKS_PER_PIECE - 1) / CHUNKS_PER_PIECE; }
    const float *of_row(int row) const { return logits + (rows == nullptr ? row : rows[row]) * stride; }
};

static void find_bests(const void *task, int piece, int) {
    const Choose &choose_ = *static_cast<const Choose *>(task);
    const int row = piece / choose_.pieces(), first = piece % choose_.pieces() * CHUNKS_PER_PIECE;
    const float *x = choose_.of_row(row);
    for (int chunk = first; chunk < std::min(choose_.chunks(), first + CHUNKS_PER_PIECE); chunk++) {
        const int last = std::min(choose_.vocabulary, (chunk + 1) * CHUNK);
        Vec most = splat(-INFINITY);
        for (int i = chunk * CHUNK; i < last; i += W) {
            const Vec value = load_some(x + i, last - i);
            most = choose(value == value, larger(value, most), splat(INFINITY));
        }
        choose_.bests[size_t(row) * choose_.chunks() + chunk] = largest_of(most);
    }
}

// Random numbers in (0, 1) of a seed and a position: SplitMix64 in counter mode (torch/random.py).
class Uniform {
  public:
    Uniform(uint64_t seed, int64_t position, int stream)
        : key_(mix(mix(mix(seed) + uint64_t(position) * GOLDEN) + MIX_2 * uint64_t(stream + 1))) {}

    double operator()(int i) const { return (double(mix(key_ + uint64_t(i + 1) * GOLDEN) >> 12) + 0.5) * 0x1p-52; }

  private:
    static constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9, MIX_2 = 0x94D049BB133111EB;

    static uint64_t mix(uint64_t x) {
        x = (x ^ (x >> 30)) * MIX_1;
        x = (x ^ (x >> 27)) * MIX_2;
        return x ^ (x >> 31);
    }

    const uint64_t key_;
};

// The exponential race: each i < num wins with its share of the mass.
template <typename Mass>
static int winner(int num, const Uniform &uniform, const Mass &mass_of) {
    int first = 0;
    double most = 0;
    for (int i = 0; i < num; i++) {
        const double mass = mass_of(i);
        if (mass == 0) continue;
        const double score = mass / -std::log(uniform(i));
        if (score > most) most = score, first = i;
    }
    return first;
}

// A row that is drawn. Scaled logits are (logit - best) / temperature, so the best one's is 0, and its mass 1.
class DrawnRow {
  public:
    struct Candidate {
        float scaled, mass;
    };

    DrawnRow(const float *logits, const float *bests, int vocabulary, int chunks, float best, float temperature)
        : logits_(logits), bests_(bests), vocabulary_(vocabulary), chunks_(chunks), best_(best),
          temperature_(temperature) {}

    int64_t draw(const DrawIntegers &integers, const DrawFloats &floats, int64_t position) const {
        const float limit = find_limit(integers.top_k, floats);
        const int chunk = winner(
            chunks_, Uniform(integers.seed, position, 0), [&](int i) { return double(mass_within(i, limit)); });
        const int first = chunk * CHUNK, num = std::min(CHUNK, vocabulary_ - first);
        float masses[CHUNK + W];
        for (int i = 0; i < num; i += W) {
            const Vec value = scaled(load_some(logits_ + first + i, num - i));
            store(masses + i, choose(value >= splat(limit), exponential(value), Vec{}));
        }
        return first + winner(num, Uniform(integers.seed, position, 1), [&](int i) { return double(masses[i]); });
    }

  private:
    Vec scaled(Vec x) const { return (x - splat(best_)) / splat(temperature_); }
    float scaled(float x) const { return (x - best_) / temperature_; }

    // -inf where nothing is cut off.
    float find_limit(int64_t top_k, const DrawFloats &floats) const {
        static thread_local std::vector<Candidate> candidates;
        float limit = -INFINITY;
        if (top_k > 0 && top_k < vocabulary_) limit = top_k_limit(top_k, candidates);
        if (floats.top_p < 1) limit = std::max(limit, top_p_limit(floats.top_p, limit, candidates));
        if (floats.min_p > 0) limit = std::max(limit, float(std::log(floats.min_p)));
        return limit;
    }

    // Each of the k best chunks has a token that is as good as the k-th of them.
    float top_k_limit(int64_t top_k, std::vector<Candidate> &candidates) const {
        float bound = -INFINITY;
        if (top_k <= chunks_) {
            std::vector<float> bests(bests_, bests_ + chunks_);
            std::nth_element(bests.begin(), bests.begin() + top_k - 1, bests.end(), std::greater<float>());
            bound = scaled(bests[top_k - 1]);
        }
        collect(bound, candidates);
        const auto last = candidates.begin() + top_k - 1;
        std::nth_element(
            candidates.begin(), last, candidates.end(), [](auto &a, auto &b) { return a.scaled > b.scaled; });
        return last->scaled;
    }

    // Of the tokens that `limit` leaves.
    float top_p_limit(double top_p, float limit, std::vector<Candidate> &candidates) const {
        if (limit > -INFINITY) {
            const double total = collect(limit, candidates);
            return least_within(candidates, top_p * total);
        }
        double total = 0;
        for (int chunk = 0; chunk < chunks_; chunk++) total += mass_within(chunk, limit);
        // Few tokens hold the mass, usually. Below the last bound none has any.
        float bound = -6;
        while (collect(bound, candidates) < top_p * total && bound > -88) bound *= 2;
        return least_within(candidates, top_p * total);
    }

    float mass_within(int chunk, float limit) const {
        if (scaled(bests_[chunk]) < limit) return 0;
        const int last = std::min(vocabulary_, (chunk + 1) * CHUNK);
        Vec sum = {};
        for (int i = chunk * CHUNK; i < last; i += W) {
            const Vec value = scaled(load_some(logits_ + i, last - i));
            sum += choose(value >= splat(limit), exponential(value), Vec{});
        }
        return sum_of(sum);
    }

    // Those of at least `bound`; returns their mass.
    double collect(float bound, std::vector<Candidate> &candidates) const {
        candidates.clear();
        double total = 0;
        float values[W], masses[W];
        for (int chunk = 0; chunk < chunks_; chunk++) {
            if (scaled(bests_[chunk]) < bound) continue;
            const int last = std::min(vocabulary_, (chunk + 1) * CHUNK);
            for (int i = chunk * CHUNK; i < last; i += W) {
                const Vec value = scaled(load_some(logits_ + i, last - i));
                if (largest_of(value) < bound) continue;
                store(values, value);
                store(masses, exponential(value));
                for (int lane = 0; lane < std::min(W, last - i); lane++) {
                    if (values[lane] < bound) continue;
                    candidates.push_back({values[lane], masses[lane]});
                    total += masses[lane];
                }
            }
        }
        return total;
    }

    // The least of the smallest set of best ones whose mass is `goal`, by partition, as quickselect does. Reorders them.
    static float least_within(std::vector<Candidate> &candidates, double goal) {
        auto begin = candidates.begin(), end = candidates.end();
        while (true) {
            const float a = begin->scaled, b = (begin + (end - begin) / 2)->scaled, c = (end - 1)->scaled;
            const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
            const auto equal = std::partition(begin, end, [=](auto &one) { return one.scaled > pivot; });
            const auto less = std::partition(equal, end, [=](auto &one) { return one.scaled == pivot; });
            double above = 0, level = 0;
            for (auto one = begin; one != equal; one++) above += one->mass;
            for (auto one = equal; one != less; one++) level += one->mass;
            if (begin != equal && above >= goal) {
                end = equal;
                continue;
            }
            goal -= above + level;
            if (goal <= 0 || less == end) return pivot;
            begin = less;
        }
    }

    const float *logits_, *bests_;
    const int vocabulary_, chunks_;
    const float best_, temperature_;
};

static void pick(const void *task, int row, int) {
    const Choose &choose_ = *static_cast<const Choose *>(task);
    const float *x = choose_.of_row(row), *bests = choose_.bests + size_t(row) * choose_.chunks();
    const float *first = std::max_element(bests, bests + choose_.chunks());
    int64_t &id = choose_.ids[row];
    id = -1;
    if (!std::isfinite(*first)) return;
    const int64_t slot = choose_.floats == nullptr ? 0 : choose_.slots[row];
    if (choose_.floats == nullptr || choose_.floats[slot].temperature < GREEDY_TEMPERATURE) {
        id = std::find(x + (first - bests) * CHUNK, x + choose_.vocabulary, *first) - x;
        return;
    }
    const DrawFloats &floats = choose_.floats[slot];
    const DrawnRow drawn(x, bests, choose_.vocabulary, choose_.chunks(), *first, float(floats.temperature));
    id = drawn.draw(choose_.integers[slot], floats, choose_.positions[row]);
}
