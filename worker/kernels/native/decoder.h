// All layers of a decoder over the tokens of a step, as one list of phases.
#pragma once

#include <deque>

#include "phases.h"
#include "pool.h"
#include "workspace.h"

constexpr int MAX_TOKENS = 1024;  // that go through the layers together: their activations stay in the caches

// The structs down to Step are shared with Python (library.py), field by field.
struct Layer {
    Matrix qkv, output, gate_up, down;
    const float *attention_norm, *mlp_norm, *q_norm, *k_norm, *cos, *sin;
    float *k, *v;
};

struct Model {
    int32_t num_layers, hidden_size, intermediate_size, heads, kv_heads, head_dim, block_size;
    int64_t block_stride;
    float scale, eps, head_eps;
    const float *norm;
    const Layer *layers;
};

static inline Shape shape_of(const Model &model) {
    return {model.heads, model.kv_heads, model.head_dim, model.block_size, model.block_stride, model.scale};
}

struct Step {
    int32_t num_tokens, num_rows, table_stride;
    const int64_t *positions, *slots;
    const int32_t *query_starts, *context_lens, *block_tables;
};

class StepWork {
  public:
    StepWork(const Shape &shape, const Step &step, Workspace &workspace, int num_threads)
        : shape_(shape), step_(step), workspace_(workspace) {
        for (int i = 0; i < num_threads; i++) scratch_.push_back(workspace.floats(attention_scratch(shape)));
    }

    // Tokens begin ... end of the step, whose activations are in `qkv`, to `out`.
    void add_attention(int begin, int end, const float *qkv, size_t stride, const float *k, const float *v, float *out) {
        if (items_.empty()) share_out(begin, end);
        attentions_.push_back(Attention{
            shape_, qkv, stride, k, v, out, &items_, &merges_, partials_, queries_per_partial_, scratch_.data()});
        phases.push_back({attend_item, &attentions_.back(), int(items_.size())});
        if (!merges_.empty()) phases.push_back({merge_partials, &attentions_.back(), int(merges_.size())});
    }

    void add_write(const WriteQkv &write) {
        writes_.push_back(write);
        phases.push_back({run_write_qkv, &writes_.back(), write.num_chunks()});
    }

    // x, normed where there is a norm, in the form in which `matrix` reads it; valid until the next one.
    Rows add_prepare(const float *x, int num_rows, const float *norm, float eps, const Matrix &matrix) {
        const int size = matrix.in;
        Prepare prepare{x, size, num_rows, norm, eps, nullptr, nullptr, nullptr, nullptr, matrix.block};
        if (norm != nullptr) prepare.out = workspace_.reused(0, size_t(num_rows) * size);
        if (matrix.bits != 32) {
            const size_t num_words = (size_t(num_rows) * size + 3) / 4;
            prepare.numbers = reinterpret_cast<int8_t *>(workspace_.reused(1, num_words));
            prepare.scales = workspace_.reused(2, size_t(num_rows) * (size / ROW_BLOCK));
            prepare.sums = workspace_.reused(3, size_t(num_rows) * (size / matrix.block));
        }
        if (prepare.out != nullptr || prepare.numbers != nullptr) {
            prepares_.push_back(prepare);
            phases.push_back({run_prepare, &prepares_.back(), row_chunks(num_rows)});
        }
        return Rows{
            norm != nullptr ? prepare.out : x, size_t(size),
            {prepare.numbers, prepare.scales, prepare.sums, size, matrix.block}};
    }

    void add_norm(const float *x, int num_rows, int size, const float *norm, float eps, float *out) {
        prepares_.push_back(Prepare{x, size, num_rows, norm, eps, out, nullptr, nullptr, nullptr, 0});
        phases.push_back({run_prepare, &prepares_.back(), row_chunks(num_rows)});
    }

    void add_product(const Rows &rows, int num_rows, const Matrix &matrix, float *out, size_t stride, Into into) {
        products_.push_back(Product{rows, num_rows, matrix, out, stride, into, 0, 0, 0});
        const int chunks = plan(products_.back());
        phases.push_back({run_product, &products_.back(), chunks});
    }

    std::vector<Phase> phases;

  private:
    // Rows of few tokens are cut along their keys, as they alone may have to keep all threads busy; chunks of prompts
    // along their tokens, the last of which, with the most keys, come first.
    void share_out(int begin, int end) {
        const int tile = std::max(1, TILE_QUERIES / shape_.group());
        constexpr int FEW = 4;
        int num_partials = 0;
        for (int row = 0; row < step_.num_rows; row++) {
            const int row_end = step_.query_starts[row + 1], context = step_.context_lens[row];
            const int first = std::max(begin, step_.query_starts[row]), last = std::min(end, row_end);
            if (first >= last || context == 0) continue;
            const int32_t *blocks = step_.block_tables + size_t(row) * step_.table_stride;
            const int shift = context - row_end;  // from a token of the step to its position
            if (last - first <= std::min(FEW, tile)) {
                const AttentionItem item{blocks, 0, first - begin, last - first, first + shift, 0, last + shift, -1};
                cut_along_keys(item, num_partials);
                continue;
            }
            for (int at = last; at > first; at -= tile)
                for (int head = 0; head < shape_.kv_heads; head++) {
                    const int from = std::max(first, at - tile);
                    items_.push_back({blocks, head, from - begin, at - from, from + shift, 0, at + shift, -1});
                }
        }
        queries_per_partial_ = FEW * shape_.group();
        partials_ = workspace_.floats(size_t(num_partials) * queries_per_partial_ * (shape_.head_dim + 2));
    }

    void cut_along_keys(AttentionItem item, int &num_partials) {
        const int parts = (item.last_key + KEYS - 1) / KEYS, last_key = item.last_key;
        for (item.kv_head = 0; item.kv_head < shape_.kv_heads; item.kv_head++) {
            if (parts > 1)
                merges_.push_back({num_partials, parts, item.kv_head, item.first_token, item.num_tokens});
            for (int part = 0; part < parts; part++) {
                item.first_key = part * KEYS;
                item.last_key = std::min(last_key, item.first_key + KEYS);
                item.partial = parts > 1 ? num_partials++ : -1;
                items_.push_back(item);
            }
        }
    }

    const Shape shape_;
    const Step &step_;
    Workspace &workspace_;
    std::vector<AttentionItem> items_;
    std::vector<Merge> merges_;
    float *partials_ = nullptr;
    int queries_per_partial_ = 0;
    std::vector<float *> scratch_;
    std::deque<Attention> attentions_;
    std::deque<WriteQkv> writes_;
    std::deque<Prepare> prepares_;
    std::deque<Product> products_;
};

// x [tokens][hidden], the embeddings, becomes the residual stream; out gets the last hidden states, normed.
class Decoding {
  public:
    Decoding(const Model &model, const Step &step, float *x, float *out, Workspace &workspace, int num_threads)
        : model_(model), step_(step), workspace_(workspace), num_threads_(num_threads), x_(x), out_(out),
          shape_(shape_of(model)) {}

    void run(Pool &pool) {
        for (int begin = 0; begin < step_.num_tokens; begin += MAX_TOKENS) {
            workspace_.reset();
            run_tokens(begin, std::min(step_.num_tokens, begin + MAX_TOKENS), pool);
        }
    }

  private:
    void run_tokens(int begin, int end, Pool &pool) {
        const int num = end - begin, hidden = model_.hidden_size, inner = model_.intermediate_size;
        const int width = (model_.heads + 2 * model_.kv_heads) * model_.head_dim, mixed_width = model_.heads * model_.head_dim;
        float *qkv = workspace_.floats(size_t(num) * width);
        float *mixed = workspace_.floats(size_t(num) * mixed_width);
        float *gated = workspace_.floats(size_t(num) * inner);
        float *x = x_ + size_t(begin) * hidden;
        StepWork work(shape_, step_, workspace_, num_threads_);
        for (int i = 0; i < model_.num_layers; i++) {
            const Layer &layer = model_.layers[i];
            Rows rows = work.add_prepare(x, num, layer.attention_norm, model_.eps, layer.qkv);
            work.add_product(rows, num, layer.qkv, qkv, width, Into::store);
            work.add_write(WriteQkv{
                shape_, qkv, size_t(width), num, layer.q_norm, layer.k_norm, model_.head_eps, layer.cos, layer.sin,
                step_.positions + begin, step_.slots + begin, layer.k, layer.v});
            work.add_attention(begin, end, qkv, width, layer.k, layer.v, mixed);
            rows = work.add_prepare(mixed, num, nullptr, 0, layer.output);
            work.add_product(rows, num, layer.output, x, hidden, Into::add);
            rows = work.add_prepare(x, num, layer.mlp_norm, model_.eps, layer.gate_up);
            work.add_product(rows, num, layer.gate_up, gated, inner, Into::gate);
            rows = work.add_prepare(gated, num, nullptr, 0, layer.down);
            work.add_product(rows, num, layer.down, x, hidden, Into::add);
        }
        work.add_norm(x, num, hidden, model_.norm, model_.eps, out_ + size_t(begin) * hidden);
        pool.run(work.phases);
    }

    const Model &model_;
    const Step &step_;
    Workspace &workspace_;
    const int num_threads_;
    float *x_, *out_;
    const Shape shape_;
};
