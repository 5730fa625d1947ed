// Routed experts: the tokens of each go through its products together, so that its weights are read once.
#pragma once

#include "phases.h"
#include "pool.h"
#include "workspace.h"

constexpr int MAX_EXPERT_TOKENS = 1024;  // that go to their experts together

// Shared with Python (library.py), field by field.
struct Experts {
    Matrix gate_up, down;  // of the first expert; those of the others lie behind it, biases too
    int32_t num_experts, first_expert, top_k;
    Gate gate;
};

// Products of several matrices as one phase.
struct Products {
    std::vector<Product> products;
    std::vector<int> ends;  // of their chunks

    void add(const Product &product) {
        products.push_back(product);
        ends.push_back(num_chunks() + plan(products.back()));
    }
    int num_chunks() const { return ends.empty() ? 0 : ends.back(); }
};

static void run_products(const void *task, int chunk, int thread) {
    const Products &all = *static_cast<const Products *>(task);
    const size_t number = std::upper_bound(all.ends.begin(), all.ends.end(), chunk) - all.ends.begin();
    run_product(&all.products[number], number == 0 ? chunk : chunk - all.ends[number - 1], thread);
}

// out [tokens][size]: the sum of a token's results, in the order in which it chose, whoever computed them.
struct Combine {
    const float *results;  // by pair
    const int *pairs;      // [tokens][k], below 0: somebody else's
    const float *weights;  // [tokens][k]
    float *out;
    int num_tokens, top_k, size;
};

static void run_combine(const void *task, int chunk, int) {
    const Combine &combine = *static_cast<const Combine *>(task);
    const int last = std::min(combine.num_tokens, (chunk + 1) * ROWS_PER_CHUNK);
    for (int token = chunk * ROWS_PER_CHUNK; token < last; token++) {
        float *out = combine.out + size_t(token) * combine.size;
        memset(out, 0, combine.size * sizeof(float));
        for (int k = 0; k < combine.top_k; k++) {
            const int pair = combine.pairs[token * combine.top_k + k];
            if (pair < 0) continue;
            const float *result = combine.results + size_t(pair) * combine.size;
            const float weight = combine.weights[token * combine.top_k + k];
            for (int i = 0; i < combine.size; i++) out[i] += weight * result[i];
        }
    }
}

// What some tokens' experts make of them. A pair is a token and one of its experts; pairs are in the order of experts.
class Routing {
  public:
    Routing(const Experts &experts, const float *x, const float *weights, const int64_t *ids, int num_tokens, float *out)
        : experts_(experts), x_(x), weights_(weights), num_tokens_(num_tokens), out_(out),
          firsts_(experts.num_experts + 1), pairs_(size_t(num_tokens) * experts.top_k, -1) {
        sort(ids);
    }

    void run(Pool &pool, Workspace &workspace) {
        const Matrix &gate_up = experts_.gate_up, &down = experts_.down;
        const int num = int(tokens_.size()), inner = down.in, hidden = gate_up.in;
        float *gated = workspace.floats(size_t(num) * inner), *results = workspace.floats(size_t(num) * down.out);
        const int threads = pool.num_threads();
        std::vector<Phase> phases;

        Gather gather{x_, size_t(hidden), tokens_.data(), nullptr};
        if (gate_up.bits == 32) {
            gather.to = workspace.floats(size_t(num) * hidden);
            phases.push_back({run_gather, &gather, num});
        }
        const RoundedRows first = rounded_rows(num, gate_up, workspace), second = rounded_rows(num, down, workspace);
        Prepare prepare{x_, hidden, num, nullptr, 0, nullptr, first};
        prepare.sources = tokens_.data();
        if (gate_up.bits != 32) phases.push_back({run_prepare, &prepare, row_chunks(num)});
        const Rows rows{gather.to, size_t(hidden), first.finished()};
        const Products ups = products(rows, gate_up, gated, inner, Into::gate, second, threads);
        phases.push_back({run_products, &ups, ups.num_chunks()});

        const Rows gated_rows{gated, size_t(inner), second.finished()};
        const Products downs = products(gated_rows, down, results, down.out, Into::store, {}, threads);
        phases.push_back({run_products, &downs, downs.num_chunks()});

        const Combine combine{results, pairs_.data(), weights_, out_, num_tokens_, experts_.top_k, down.out};
        phases.push_back({run_combine, &combine, row_chunks(num_tokens_)});
        pool.run(phases);
    }

  private:
    void sort(const int64_t *ids) {
        const auto expert_of = [&](size_t pair) {
            const int64_t expert = ids[pair] - experts_.first_expert;
            return 0 <= expert && expert < experts_.num_experts ? int(expert) : -1;
        };
        for (size_t pair = 0; pair < pairs_.size(); pair++)
            if (const int expert = expert_of(pair); expert >= 0) firsts_[expert + 1]++;
        std::partial_sum(firsts_.begin(), firsts_.end(), firsts_.begin());
        tokens_.resize(firsts_.back());
        std::vector<int> next(firsts_);
        for (size_t pair = 0; pair < pairs_.size(); pair++) {
            const int expert = expert_of(pair);
            if (expert < 0) continue;
            pairs_[pair] = next[expert]++;
            tokens_[pairs_[pair]] = int(pair / experts_.top_k);
        }
    }

    static RoundedRows rounded_rows(size_t num, const Matrix &matrix, Workspace &workspace) {
        if (matrix.bits == 32) return {};
        const size_t room = room_for(num);
        return {reinterpret_cast<int8_t *>(workspace.floats(room * matrix.in / sizeof(float))),
                workspace.floats(room * (matrix.in / ROW_BLOCK)), workspace.floats(room * (matrix.in / matrix.block)),
                room, matrix.block, Start::of(matrix)};
    }

    // Of each expert that somebody chose.
    Products products(
        const Rows &rows, const Matrix &first, float *out, size_t stride, Into into, const RoundedRows &rounded,
        int threads) const {
        Products all;
        const size_t size = num_panels(first) * panel_bytes(first);
        for (int expert = 0; expert < experts_.num_experts; expert++) {
            const int begin = firsts_[expert], num = firsts_[expert + 1] - begin;
            if (num == 0) continue;
            Matrix matrix = first;
            matrix.data = static_cast<const uint8_t *>(first.data) + expert * size;
            if (first.bias != nullptr) matrix.bias = first.bias + size_t(expert) * first.out;
            all.add(Product{
                from(rows, begin), num, matrix, out + begin * stride, stride, into, threads, 0, 0, experts_.gate,
                rounded.from(begin)});
        }
        return all;
    }

    static Rows from(Rows rows, size_t begin) {
        if (rows.values != nullptr) rows.values += begin * rows.stride;
        QuantizedRows &quantized = rows.quantized;
        if (quantized.numbers == nullptr) return rows;
        quantized.numbers += begin * ROW_BLOCK;
        quantized.scales += begin;
        quantized.sums += begin;
        return rows;
    }

    const Experts &experts_;
    const float *x_, *weights_;
    const int num_tokens_;
    float *out_;
    std::vector<int> firsts_;  // pair of each expert, and their number
    std::vector<int> tokens_;  // of each pair
    std::vector<int> pairs_;   // [tokens][k], below 0: the expert is not here
};
