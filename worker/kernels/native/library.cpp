// The functions that Python calls (library.py). Sizes and pointers are checked there; nothing here throws.

#include <mutex>

#include "decoder.h"

namespace {

struct Engine {
    explicit Engine(int num_threads) : pool(num_threads) {}
    Pool pool;
    Workspace workspace;
    std::mutex mutex;  // of the workspace
};

uint8_t *pack_strip(const uint8_t *numbers, const uint16_t *scales, const uint16_t *minima, const Matrix &matrix,
                    int first, uint8_t *to) {
    const int num_blocks = matrix.in / matrix.block, block = matrix.block;
    for (int b = 0; b < num_blocks; b++) {
        uint16_t halves[2 * W] = {};
        for (int o = 0; o < W && first + o < matrix.out; o++) {
            halves[o] = scales[size_t(first + o) * num_blocks + b];
            halves[W + o] = minima[size_t(first + o) * num_blocks + b];
        }
        memcpy(to, halves, sizeof halves);
        to += sizeof halves;
        const int steps = matrix.bits == 4 ? block / 8 : block / 4;
        for (int s = 0; s < steps; s++)
            for (int o = 0; o < W; o++)
                for (int j = 0; j < 4; j++, to++) {
                    *to = 0;
                    if (first + o >= matrix.out) continue;
                    const uint8_t *row = numbers + size_t(first + o) * matrix.in + b * block + 4 * s + j;
                    *to = matrix.bits == 4 ? uint8_t(row[0] | row[block / 2] << 4) : row[0];
                }
    }
    return to;
}

}  // namespace

extern "C" {

int fissile_vector_width() { return W; }

void *fissile_create(int num_threads) { return new Engine(num_threads); }

void fissile_destroy(void *engine) { delete static_cast<Engine *>(engine); }

size_t fissile_packed_bytes(const Matrix *matrix) { return num_panels(*matrix) * panel_bytes(*matrix); }

// weight [out][in] of a matrix of 32 bits → to.
void fissile_pack_floats(const Matrix *matrix, const float *weight, float *to) {
    for (int panel = 0; panel < num_panels(*matrix); panel++)
        for (int i = 0; i < matrix->in; i++)
            for (int o = 0; o < PANEL; o++) {
                const int out = panel * PANEL + o;
                *to++ = out < matrix->out ? weight[size_t(out) * matrix->in + i] : 0.0f;
            }
}

// numbers [out][in], scales and minima [out][in / block] in half precision → to.
void fissile_pack_blocks(
    const Matrix *matrix, const uint8_t *numbers, const uint16_t *scales, const uint16_t *minima, uint8_t *to) {
    for (int strip = 0; strip < 2 * num_panels(*matrix); strip++)
        to = pack_strip(numbers, scales, minima, *matrix, strip * W, to);
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
            unpack_row(base, place, matrix->in, matrix->bits, matrix->block, out);
        }
    }
    return true;
}

void fissile_product(void *handle, const Matrix *matrix, const float *x, int num_rows, float *out) {
    Engine &engine = *static_cast<Engine *>(handle);
    std::lock_guard lock(engine.mutex);
    engine.workspace.reset();
    const Step no_step{};
    StepWork work(Shape{}, no_step, engine.workspace, 0);
    const Rows rows = work.add_prepare(x, num_rows, nullptr, 0, *matrix);
    work.add_product(rows, num_rows, *matrix, out, matrix->out, Into::store);
    engine.pool.run(work.phases);
}

void fissile_write_qkv(void *handle, const Model *model, const Layer *layer, const Step *step, float *qkv) {
    Engine &engine = *static_cast<Engine *>(handle);
    std::lock_guard lock(engine.mutex);
    const Shape shape = shape_of(*model);
    const WriteQkv write{
        shape, qkv, size_t(shape.heads + 2 * shape.kv_heads) * shape.head_dim, step->num_tokens, layer->q_norm,
        layer->k_norm, model->head_eps, layer->cos, layer->sin, step->positions, step->slots, layer->k, layer->v};
    engine.pool.run({{run_write_qkv, &write, row_chunks(step->num_tokens)}});
}

// q: queries [tokens][heads * D], `stride` floats from token to token.
void fissile_attend(
    void *handle, const Model *model, const Layer *layer, const Step *step, const float *q, int64_t stride, float *out) {
    Engine &engine = *static_cast<Engine *>(handle);
    std::lock_guard lock(engine.mutex);
    engine.workspace.reset();
    StepWork work(shape_of(*model), *step, engine.workspace, engine.pool.num_threads());
    work.add_attention(0, step->num_tokens, q, stride, layer->k, layer->v, out);
    engine.pool.run(work.phases);
}

void fissile_decode(void *handle, const Model *model, const Step *step, float *x, float *out) {
    Engine &engine = *static_cast<Engine *>(handle);
    std::lock_guard lock(engine.mutex);
    Decoding(*model, *step, x, out, engine.workspace, engine.pool.num_threads()).run(engine.pool);
}

}
