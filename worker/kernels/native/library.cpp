// The functions that Python calls (library.py). Sizes and pointers are checked there; nothing here throws.

#include <mutex>

#include "choose.h"
#include "decoder.h"
#include "experts.h"
#include "pack.h"
#include "slots.h"

namespace {

struct Engine {
    explicit Engine(int num_threads) : pool(num_threads) {}
    Pool pool;
    Workspace workspace;
    std::mutex mutex;  // of the workspace
};

// A product that is no part of a step. It has the workspace, and what lies in there, until its end.
class LoneProduct {
  public:
    LoneProduct(void *handle, const Matrix &matrix, const float *x, int num_rows)
        : engine_(*static_cast<Engine *>(handle)), lock_(engine_.mutex),
          work(Shape{}, no_step_, engine_.workspace, num_threads()) {
        engine_.workspace.reset();
        rows = work.add_prepare(x, num_rows, nullptr, 0, matrix);
    }

    int num_threads() const { return engine_.pool.num_threads(); }
    void run() { engine_.pool.run(work.phases); }

  private:
    Engine &engine_;
    const std::lock_guard<std::mutex> lock_;
    const Step no_step_{};

  public:
    StepWork work;
    Rows rows;
};

}  // namespace

extern "C" {

int fissile_vector_width() { return W; }

void *fissile_create(int num_threads) { return new Engine(num_threads); }

void fissile_destroy(void *engine) { delete static_cast<Engine *>(engine); }

size_t fissile_packed_bytes(const Matrix *matrix) { return num_panels(*matrix) * panel_bytes(*matrix); }

// weight [out][in] of a matrix of 32 bits → to.
void fissile_pack_floats(void *engine, const Matrix *matrix, const float *weight, float *to) {
    const PackFloats pack{*matrix, weight, to};
    static_cast<Engine *>(engine)->pool.run({{pack_floats, &pack, num_panels(*matrix)}});
}

// Blocks of a matrix of any bits, which become floats where it has 32 → to.
void fissile_pack_blocks(void *engine, const Matrix *matrix, const Stored *stored, uint8_t *to) {
    const PackBlocks pack{*matrix, *stored, to};
    static_cast<Engine *>(engine)->pool.run({{pack_blocks, &pack, num_panels(*matrix)}});
}

// Rows `ids` of a packed matrix, as floats: out [num][in]. False where there is no such row.
bool fissile_rows(const Matrix *matrix, const int64_t *ids, int num, float *out) {
    const auto *data = static_cast<const uint8_t *>(matrix->data);
    for (int row = 0; row < num; row++)
        if (ids[row] < 0 || ids[row] >= matrix->out) return false;
    for (int row = 0; row < num; row++, out += matrix->in) {
        const size_t panel = ids[row] / PANEL, place = ids[row] % PANEL;
        const uint8_t *base = data + panel * panel_bytes(*matrix);
        if (matrix->bits == 32) {
            const auto *weight = reinterpret_cast<const float *>(base) + place;
            for (int i = 0; i < matrix->in; i++) out[i] = weight[size_t(i) * PANEL];
        } else {
            unpack_row(base, place, *matrix, out);
        }
    }
    return true;
}

void fissile_product(void *handle, const Matrix *matrix, const float *x, int num_rows, float *out) {
    LoneProduct product(handle, *matrix, x, num_rows);
    product.work.add_product(product.rows, num_rows, *matrix, out, matrix->out, Into::store);
    product.run();
}

// See LinearKernel (linear.py).
void fissile_best(void *handle, const Matrix *matrix, const float *x, int num_rows, int64_t *ids) {
    LoneProduct product(handle, *matrix, x, num_rows);
    const Best *bests = product.work.add_best(product.rows, num_rows, *matrix);
    product.run();
    for (int row = 0; row < num_rows; row++) {
        Best best;
        for (int thread = 0; thread < product.num_threads(); thread++)
            best.see(bests[thread * num_rows + row].value, bests[thread * num_rows + row].output);
        ids[row] = std::isfinite(best.value) ? best.output : -1;
    }
}

void fissile_write_qkv(void *handle, const Model *model, const Layer *layer, const Step *step, float *qkv) {
    Engine &engine = *static_cast<Engine *>(handle);
    std::lock_guard lock(engine.mutex);
    const Shape shape = shape_of(*model);
    const WriteQkv write{
        shape, qkv, size_t(shape.heads + 2 * shape.kv_heads) * shape.head_dim, step->num_tokens, layer->q_norm,
        layer->k_norm, model->head_eps, layer->cos, layer->sin, step->positions, step->slots, layer->cache};
    engine.pool.run({{run_write_qkv, &write, write.num_chunks()}});
}

// q: queries [tokens][heads * D], `stride` floats from token to token.
void fissile_attend(
    void *handle, const Model *model, const Layer *layer, const Step *step, const float *q, int64_t stride, float *out) {
    Engine &engine = *static_cast<Engine *>(handle);
    std::lock_guard lock(engine.mutex);
    engine.workspace.reset();
    StepWork work(shape_of(*model), *step, engine.workspace, engine.pool.num_threads());
    work.add_attention(0, step->num_tokens, q, stride, layer->cache, out);
    engine.pool.run(work.phases);
}

// See ExpertsKernel (experts.py).
void fissile_experts(
    void *handle, const Experts *experts, const float *x, const float *weights, const int64_t *ids, int num_tokens,
    float *out) {
    Engine &engine = *static_cast<Engine *>(handle);
    std::lock_guard lock(engine.mutex);
    for (int begin = 0; begin < num_tokens; begin += MAX_EXPERT_TOKENS) {
        engine.workspace.reset();
        const size_t pairs = size_t(begin) * experts->top_k;
        Routing routing(
            *experts, x + size_t(begin) * experts->gate_up.in, weights + pairs, ids + pairs,
            std::min(num_tokens - begin, MAX_EXPERT_TOKENS), out + size_t(begin) * experts->down.out);
        routing.run(engine.pool, engine.workspace);
    }
}

// See ChooseKernel (sampling.py).
void fissile_choose(void *handle, Choose *choose) {
    std::vector<float> bests(size_t(choose->num_rows) * choose->chunks());
    choose->bests = bests.data();
    static_cast<Engine *>(handle)->pool.run(
        {{find_bests, choose, choose->num_rows * choose->pieces()}, {pick, choose, choose->num_rows}});
}

// See PrepareKernel and RememberKernel (interface.py).
void fissile_prepare(const StagedRows *rows, const Slots *slots, const Buffers *out) {
    for (int row = 0; row < rows->num_rows; row++) prepare_row(*rows, *slots, *out, row);
}

void fissile_remember(
    const Slots *slots, const int64_t *rows, const int64_t *positions, const int64_t *token_ids, int num_rows) {
    for (int row = 0; row < num_rows; row++) {
        slots->tokens[rows[row] * slots->most_tokens + positions[row]] = int32_t(std::max<int64_t>(0, token_ids[row]));
        slots->lengths[rows[row]] = positions[row] + 1;
    }
}

// `wanted`: tokens of the step, null for all of them; out [wanted][hidden].
void fissile_decode(
    void *handle, const Model *model, const Step *step, const int64_t *wanted, int num_wanted, float *x, float *out) {
    Engine &engine = *static_cast<Engine *>(handle);
    std::lock_guard lock(engine.mutex);
    Decoding(*model, *step, {wanted, num_wanted}, x, out, engine.workspace, engine.pool.num_threads()).run(engine.pool);
}

}
