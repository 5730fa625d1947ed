// All layers of a decoder over the tokens of a step, as one list of phases.
#pragma once

#include <deque>
#include <iterator>

#include "pair_attention.h"
#include "phases.h"
#include "pool.h"
#include "workspace.h"
#include "write_qkv.h"

constexpr int MAX_TOKENS = 1024;  // that go through the layers together: their activations stay in the caches
constexpr int ASKED_BYTES = 3 << 19;  // of the cache, for each thread: not much more than a second cache holds

// The structs down to Step are shared with Python (library.py), field by field.
struct Layer {
    Matrix qkv, output, gate_up, down;
    const float *attention_norm, *mlp_norm, *q_norm, *k_norm, *cos, *sin;
    Cache cache;
};

struct Model {
    int32_t num_layers, hidden_size, intermediate_size, heads, kv_heads, head_dim, block_size;
    Kept kept;
    int64_t block_stride;
    float scale, eps, head_eps;
    const float *norm;
    const Layer *layers;
};

static inline Shape shape_of(const Model &model) {
    return {model.heads,        model.kv_heads, model.head_dim,  model.block_size,
            model.block_stride, model.scale,    model.kept};
}

struct Step {
    int32_t num_tokens, num_rows, table_stride;
    const int64_t *positions, *slots;
    const int32_t *query_starts, *context_lens, *block_tables;
};

class StepWork {
  public:
    StepWork(const Shape &shape, const Step &step, Workspace &workspace, int num_threads)
        : shape_(shape), step_(step), workspace_(workspace), num_threads_(num_threads) {}

    // Tokens begin ... end of the step, whose activations are in `qkv`, to `out`.
    void add_attention(int begin, int end, const float *qkv, size_t stride, const Cache &cache, float *out) {
        if (items_.empty()) share_out(begin, end);
        add_attention(items_, merges_, qkv, stride, cache, out, {});
    }

    // The same in the form in which `next` reads it; floats go to `out`.
    Rows add_attention(
        int begin, int end, const float *qkv, size_t stride, const Cache &cache, float *out, const Matrix &next) {
        if (next.bits == 32 || shape_.head_dim % ROW_BLOCK != 0) {
            add_attention(begin, end, qkv, stride, cache, out);
            return add_prepare(out, end - begin, nullptr, 0, next);
        }
        if (items_.empty()) share_out(begin, end);
        const RoundedRows rounded = rounded_rows(end - begin, next, false);
        add_attention(items_, merges_, qkv, stride, cache, out, rounded);
        return Rows{out, size_t(next.in), rounded.finished()};
    }

    // The same for these tokens alone, counted from `begin`, and for those that are computed with them: as if it were for all.
    void add_attention_of(
        const std::vector<int> &tokens, int begin, int end, const float *qkv, size_t stride, const Cache &cache,
        float *out) {
        if (items_.empty()) share_out(begin, end);
        const auto has_any = [&](auto &part) {
            const auto at = std::lower_bound(tokens.begin(), tokens.end(), part.first_token);
            return at != tokens.end() && *at < part.first_token + part.num_tokens;
        };
        std::copy_if(items_.begin(), items_.end(), std::back_inserter(some_items_), has_any);
        std::copy_if(merges_.begin(), merges_.end(), std::back_inserter(some_merges_), has_any);
        add_attention(some_items_, some_merges_, qkv, stride, cache, out, {});
    }

    // Rows of `from`, of `width` floats each, one after another.
    float *add_gather(const float *from, size_t width, const std::vector<int> &rows) {
        gathers_.push_back(Gather{from, width, rows.data(), workspace_.floats(rows.size() * width)});
        phases.push_back({run_gather, &gathers_.back(), int(rows.size())});
        return gathers_.back().to;
    }

    void add_write(const WriteQkv &write) {
        writes_.push_back(write);
        phases.push_back({run_write_qkv, &writes_.back(), write.num_chunks()});
    }

    // x, normed where there is a norm, in the form in which `matrix` reads it; valid until the next one.
    Rows add_prepare(const float *x, int num_rows, const float *norm, float eps, const Matrix &matrix) {
        const int size = matrix.in;
        Prepare prepare{x, size, num_rows, norm, eps, nullptr, rounded_rows(num_rows, matrix, norm != nullptr)};
        const bool is_rounded = matrix.bits != 32;
        if (norm != nullptr) prepare.out = workspace_.reused(0, size_t(is_rounded ? num_threads_ : num_rows) * size);
        if (norm != nullptr || is_rounded) {
            prepares_.push_back(prepare);
            phases.push_back({run_prepare, &prepares_.back(), row_chunks(num_rows)});
        }
        return Rows{norm != nullptr ? prepare.out : x, size_t(size), prepare.rounded.finished()};
    }

    // What `matrix`, of gates and ups, makes of the rows, in the form in which `next` reads it; floats go to `out`.
    Rows add_gate(const Rows &rows, int num_rows, const Matrix &matrix, float *out, const Matrix &next) {
        Product product{rows, num_rows, matrix, out, size_t(next.in), Into::gate, num_threads_, 0, 0};
        product.rounded = rounded_rows(num_rows, next, false);
        add_product(product);
        return Rows{out, size_t(next.in), product.rounded.finished()};
    }

    // Adds to x what `matrix` makes of the rows; returns x, normed, in the form in which `next` reads it.
    Rows add_residual(
        const Rows &rows, int num_rows, const Matrix &matrix, float *x, const float *norm, float eps,
        const Matrix &next) {
        Product product{rows, num_rows, matrix, x, size_t(next.in), Into::add, num_threads_, 0, 0};
        const int panels = num_panels(matrix);
        product.rounded = rounded_rows(num_rows, next, true);
        product.norm = {norm, nullptr, {workspace_.reused(7, size_t(panels) * num_rows), panels, num_rows, next.in, eps}};
        if (next.bits == 32) product.norm.values = workspace_.reused(0, size_t(num_rows) * next.in);
        add_product(product);
        return Rows{product.norm.values, size_t(next.in), product.rounded.finished(), product.norm.shares};
    }

    // To rows of `out` in their order, or to `places` of it.
    void add_norm(
        const float *x, int num_rows, int size, const float *norm, float eps, float *out, const int *places) {
        prepares_.push_back(Prepare{x, size, num_rows, norm, eps, out, {}, places});
        phases.push_back({run_prepare, &prepares_.back(), row_chunks(num_rows)});
    }

    void add_product(const Rows &rows, int num_rows, const Matrix &matrix, float *out, size_t stride, Into into) {
        add_product(Product{rows, num_rows, matrix, out, stride, into, num_threads_, 0, 0});
    }

    // Finds the rows' best outputs, of each thread its own: [threads][rows].
    const Best *add_best(const Rows &rows, int num_rows, const Matrix &matrix) {
        Product product{rows, num_rows, matrix, nullptr, 0, Into::best, num_threads_, 0, 0};
        const size_t num = size_t(num_threads_) * num_rows;
        product.bests = reinterpret_cast<Best *>(workspace_.floats(num * sizeof(Best) / sizeof(float)));
        std::uninitialized_fill_n(product.bests, num, Best{});
        add_product(product);
        return product.bests;
    }

    // The product of tokens' queries, keys and values. Of more than few it waits for arithmetic, and attention behind it for
    // memory: so what that will read of rows of few tokens is asked for meanwhile.
    void add_qkv(const Rows &rows, int begin, int end, const Matrix &matrix, const Cache &cache, float *out) {
        if (items_.empty()) share_out(begin, end);
        Product product{rows, end - begin, matrix, out, size_t(matrix.out), Into::store, num_threads_, 0, 0};
        if (matrix.bits != 32 && product.num_rows > FEW_ROWS) product.pieces = cached(cache);
        add_product(product);
    }

    std::vector<Phase> phases;

  private:
    Pieces cached(const Cache &cache) const {
        const int bytes = int(shape_.kv_heads * shape_.head_entries()) * shape_.entry_bytes();
        const int most = num_threads_ * ASKED_BYTES / (2 * bytes);
        return {places_.data(), std::min(int(places_.size()), most),
                {static_cast<const char *>(cache.k), static_cast<const char *>(cache.v)}, bytes};
    }

    void add_product(const Product &product) {
        products_.push_back(product);
        const int chunks = plan(products_.back());
        phases.push_back({run_product, &products_.back(), chunks});
    }

    // Normed rows lie apart from others: a product that reads the ones may write the others.
    RoundedRows rounded_rows(int num_rows, const Matrix &matrix, bool is_normed) {
        if (matrix.bits == 32) return {};
        const int number = is_normed ? 1 : 4;
        const size_t room = room_for(num_rows), in = matrix.in;
        return {reinterpret_cast<int8_t *>(workspace_.reused(number, room * in / sizeof(float))),
                workspace_.reused(number + 1, room * (in / ROW_BLOCK)),
                workspace_.reused(number + 2, room * (in / matrix.block)), room, matrix.block, Start::of(matrix)};
    }

    void add_attention(
        const std::vector<AttentionItem> &items, const std::vector<Merge> &merges, const float *qkv, size_t stride,
        const Cache &cache, float *out, const RoundedRows &rounded) {
        attentions_.push_back(Attention{
            shape_, qkv, stride, cache, out, &items, &merges, partials_, queries_per_partial_, scratch_.data(),
            num_threads_, rounded});
        phases.push_back({attention_over(shape_), &attentions_.back(), int(items.size())});
        if (!merges.empty()) phases.push_back({merge_partials, &attentions_.back(), int(merges.size())});
    }

    // Rows of few tokens are cut along their keys, as they alone may have to keep all threads busy; chunks of prompts
    // along their tokens, the last of which, with the most keys, come first. Neighbours of few tokens are for one thread,
    // since what becomes of them lies side by side.
    void share_out(int begin, int end) {
        const int tile = std::max(1, TILE_QUERIES / shape_.group());
        constexpr int FEW = 4;
        int num_partials = 0;
        std::vector<AttentionItem> few;
        for (int row = 0; row < step_.num_rows; row++) {
            const int row_end = step_.query_starts[row + 1], context = step_.context_lens[row];
            const int first = std::max(begin, step_.query_starts[row]), last = std::min(end, row_end);
            if (first >= last || context == 0) continue;
            const int32_t *blocks = step_.block_tables + size_t(row) * step_.table_stride;
            const int shift = context - row_end;  // from a token of the step to its position
            if (last - first <= std::min(FEW, tile)) {
                const AttentionItem item{blocks, 0, first - begin, last - first, first + shift, 0, last + shift, -1};
                cut_along_keys(item, num_partials, few);
                for (int at = 0; at < item.last_key; at += shape_.block_size)
                    places_.push_back(shape_.place(blocks[at / shape_.block_size], 0) * shape_.entry_bytes());
                continue;
            }
            for (int at = last; at > first; at -= tile)
                for (int head = 0; head < shape_.kv_heads; head++) {
                    const int from = std::max(first, at - tile);
                    items_.push_back({blocks, head, from - begin, at - from, from + shift, 0, at + shift, -1});
                }
        }
        const int num_few = int(few.size());
        for (int i = 0; i < num_few; i++) items_.push_back(few[place_of(i, num_few, num_threads_)]);
        scratch_.clear();
        for (int i = 0; i < num_threads_; i++) scratch_.push_back(workspace_.floats(attention_scratch(shape_)));
        queries_per_partial_ = FEW * shape_.group();
        partials_ = workspace_.floats(size_t(num_partials) * queries_per_partial_ * (shape_.head_dim + 2));
    }

    // Heads of the same keys one behind the other: so they lie in memory.
    void cut_along_keys(AttentionItem item, int &num_partials, std::vector<AttentionItem> &to) {
        const int parts = (item.last_key + KEYS - 1) / KEYS, last_key = item.last_key, first_partial = num_partials;
        if (parts > 1) {
            for (int head = 0; head < shape_.kv_heads; head++)
                merges_.push_back({first_partial + head * parts, parts, head, item.first_token, item.num_tokens});
            num_partials += shape_.kv_heads * parts;
        }
        for (int part = 0; part < parts; part++) {
            item.first_key = part * KEYS;
            item.last_key = std::min(last_key, item.first_key + KEYS);
            for (item.kv_head = 0; item.kv_head < shape_.kv_heads; item.kv_head++) {
                item.partial = parts > 1 ? first_partial + item.kv_head * parts + part : -1;
                to.push_back(item);
            }
        }
    }

    const Shape shape_;
    const Step &step_;
    Workspace &workspace_;
    const int num_threads_;
    std::vector<AttentionItem> items_, some_items_;
    std::vector<Merge> merges_, some_merges_;
    std::vector<int64_t> places_;  // in the cache, in bytes: of all blocks of rows of few tokens
    float *partials_ = nullptr;
    int queries_per_partial_ = 0;
    std::vector<float *> scratch_;
    std::deque<Attention> attentions_;
    std::deque<WriteQkv> writes_;
    std::deque<Prepare> prepares_;
    std::deque<Product> products_;
    std::deque<Gather> gathers_;
};

// Tokens of a step, and the rows of the result that they are.
struct Wanted {
    const int64_t *tokens;  // null: all, in their order
    int num;
};

// x [tokens][hidden], the embeddings, becomes the residual stream; out gets the last hidden states, normed, of the tokens
// that are wanted. Of all others the last layer leaves keys and values alone.
class Decoding {
  public:
    Decoding(
        const Model &model, const Step &step, const Wanted &wanted, float *x, float *out, Workspace &workspace,
        int num_threads)
        : model_(model), step_(step), wanted_(wanted), workspace_(workspace), num_threads_(num_threads), x_(x),
          out_(out), shape_(shape_of(model)) {}

    void run(Pool &pool) {
        for (int begin = 0; begin < step_.num_tokens; begin += MAX_TOKENS) {
            workspace_.reset();
            run_tokens(begin, std::min(step_.num_tokens, begin + MAX_TOKENS), pool);
        }
    }

  private:
    // What goes through the layers together, from one to the next.
    struct Stream {
        int begin, end;
        float *x, *qkv, *mixed, *gated;

        int num() const { return end - begin; }
    };

    void run_tokens(int begin, int end, Pool &pool) {
        const int num = end - begin, hidden = model_.hidden_size;
        const Stream stream{
            begin, end, x_ + size_t(begin) * hidden, workspace_.floats(size_t(num) * width()),
            workspace_.floats(size_t(num) * mixed_width()), workspace_.floats(size_t(num) * model_.intermediate_size)};
        StepWork work(shape_, step_, workspace_, num_threads_);
        const int num_whole = model_.num_layers - (wanted_.tokens != nullptr);
        Rows rows = work.add_prepare(stream.x, num, model_.layers[0].attention_norm, model_.eps, model_.layers[0].qkv);
        for (int i = 0; i < num_whole; i++) {
            const Layer &layer = model_.layers[i], *next = i + 1 < model_.num_layers ? &layer + 1 : nullptr;
            add_qkv(work, stream, layer, rows);
            const Rows mixed =
                work.add_attention(begin, end, stream.qkv, width(), layer.cache, stream.mixed, layer.output);
            rows = add_rest(work, layer, mixed, stream.gated, stream.x, num, next);
        }
        std::vector<int> tokens, places;
        if (wanted_.tokens == nullptr) {
            work.add_norm(stream.x, num, hidden, model_.norm, model_.eps, out_ + size_t(begin) * hidden, nullptr);
        } else {
            find_wanted(begin, end, tokens, places);
            add_last(work, stream, model_.layers[num_whole], rows, tokens, places);
        }
        pool.run(work.phases);
    }

    void add_last(
        StepWork &work, const Stream &stream, const Layer &layer, const Rows &rows, const std::vector<int> &tokens,
        const std::vector<int> &places) {
        add_qkv(work, stream, layer, rows);
        if (tokens.empty()) return;
        const int num = int(tokens.size());
        work.add_attention_of(
            tokens, stream.begin, stream.end, stream.qkv, width(), layer.cache, stream.mixed);
        const float *mixed = work.add_gather(stream.mixed, mixed_width(), tokens);
        float *x = work.add_gather(stream.x, model_.hidden_size, tokens);
        add_rest(work, layer, work.add_prepare(mixed, num, nullptr, 0, layer.output), stream.gated, x, num, nullptr);
        work.add_norm(x, num, model_.hidden_size, model_.norm, model_.eps, out_, places.data());
    }

    void add_qkv(StepWork &work, const Stream &stream, const Layer &layer, const Rows &rows) const {
        work.add_qkv(rows, stream.begin, stream.end, layer.qkv, layer.cache, stream.qkv);
        work.add_write(WriteQkv{
            shape_, stream.qkv, width(), stream.num(), layer.q_norm, layer.k_norm, model_.head_eps, layer.cos,
            layer.sin, step_.positions + stream.begin, step_.slots + stream.begin, layer.cache});
    }

    // What follows attention, added to x. Returns what the next layer reads, if there is one.
    Rows add_rest(
        StepWork &work, const Layer &layer, const Rows &mixed, float *gated, float *x, int num, const Layer *next) const {
        const float eps = model_.eps;
        Rows rows = work.add_residual(mixed, num, layer.output, x, layer.mlp_norm, eps, layer.gate_up);
        rows = work.add_gate(rows, num, layer.gate_up, gated, layer.down);
        if (next != nullptr) return work.add_residual(rows, num, layer.down, x, next->attention_norm, eps, next->qkv);
        work.add_product(rows, num, layer.down, x, model_.hidden_size, Into::add);
        return {};
    }

    // Those between, counted from `begin`, in rising order, and where they go.
    void find_wanted(int begin, int end, std::vector<int> &tokens, std::vector<int> &places) const {
        std::vector<std::pair<int, int>> found;
        for (int place = 0; place < wanted_.num; place++) {
            const int64_t token = wanted_.tokens[place];
            if (begin <= token && token < end) found.emplace_back(int(token) - begin, place);
        }
        std::sort(found.begin(), found.end());
        for (auto [token, place] : found) tokens.push_back(token), places.push_back(place);
    }

    size_t width() const { return size_t(model_.heads + 2 * model_.kv_heads) * model_.head_dim; }
    size_t mixed_width() const { return size_t(model_.heads) * model_.head_dim; }

    const Model &model_;
    const Step &step_;
    const Wanted &wanted_;
    Workspace &workspace_;
    const int num_threads_;
    float *x_, *out_;
    const Shape shape_;
};
