// Weights as whole numbers in blocks: weight = scale * number + minimum, numbers of 4 or 8 bits without a sign.
//
// A strip of W outputs lies together, block by block: W scales and W minima in half precision, then the numbers, four
// inputs of each output side by side, as one instruction multiplies them with four inputs of a row. With 4 bits a byte
// holds number i of the first half of a block below number i of the second half.
#pragma once

#include "vector.h"

// Shared with Python (library.py), field by field.
struct Matrix {
    const void *data;
    const float *bias;  // may be null
    int32_t in, out;
    int32_t bits;    // 32: floats [panels][in][PANEL] (matrix.h); 4 or 8: blocks
    int32_t block;   // inputs that share a scale
    int32_t middle;  // of 8 bits: each minimum is -middle times its block's scale; 0: it is not
};

// Rows of activations, each cut into blocks of 32 that share a scale: value = scale * number. The rows' first blocks lie
// together, then their second ones: what a thread makes of some outputs is in lines that no other thread writes to.
constexpr int ROW_BLOCK = 32;

struct QuantizedRows {
    const int8_t *numbers;  // [in / 32][stride][32]
    const float *scales;    // [in / 32][stride]
    union {
        const float *sums;      // [in / block][stride]: of the values, of each block of the weights
        const int32_t *starts;  // the same: with what sums begin (whole_scales.h, centred.h)
    };
    size_t stride;
};

static inline size_t block_bytes(int bits, int block) { return 2 * W * sizeof(uint16_t) + size_t(W) * block * bits / 8; }

#if defined(__AVX512F__)
static inline Vec load_halves(const uint16_t *from) {
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}
#else
static inline Vec load_halves(const uint16_t *from) {
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
#endif

typedef uint8_t ByteVec __attribute__((vector_size(W * 4)));

// Of W outputs, what four inputs at a time add up to in a block, exactly: byte 4 o + j of the weights with byte j of
// `four`, which have a sign.
#if defined(__AVX512VNNI__)
template <int BITS>
struct WholeSum {
    IntVec total = {};
    void add(ByteVec weights, int32_t four) {
        total = (IntVec)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weights, _mm512_set1_epi32(four));
    }
    IntVec value() const { return total; }
};
#else
typedef int16_t ShortVec __attribute__((vector_size(W * 4)));

#if defined(__AVX512F__)
static inline ShortVec add_pairs(ByteVec weights, int32_t four) {
    return (ShortVec)_mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32(four));
}
static inline IntVec add_pairs(ShortVec sums) {
    return (IntVec)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
}
#else
static inline ShortVec add_pairs(ByteVec weights, int32_t four) {
    return (ShortVec)_mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(four));
}
static inline IntVec add_pairs(ShortVec sums) {
    return (IntVec)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
}
#endif

template <int BITS>
struct WholeSum;

// Weights below 16, and at most 8 times four inputs: 8 * 2 * 15 * 128 fits into 16 bits.
template <>
struct WholeSum<4> {
    ShortVec pairs = {};  // of two inputs each
    void add(ByteVec weights, int32_t four) {
        pairs += add_pairs(weights, four);
        asm("" : "+v"(pairs));  // one sum after the other: as a tree, as GCC has it, they do not fit into registers
    }
    IntVec value() const { return add_pairs(pairs); }
};

// As two weights of 4 bits.
template <>
struct WholeSum<8> {
    WholeSum<4> low, high;
    void add(ByteVec weights, int32_t four) {
        low.add(weights & 15, four);
        high.add(weights >> 4, four);
    }
    IntVec value() const { return low.value() + (high.value() << 4); }
};
#endif

static inline ByteVec load_bytes(const uint8_t *from) {
    ByteVec value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline int32_t four_of(const int8_t *from) {
    int32_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

// Rows that go through blocks as fast as the processor reads ahead by itself: to ask for more would only be in its way.
constexpr int FEW_ROWS = 3;

// Pieces of two regions of memory, at the same places of both.
struct Pieces {
    const int64_t *places = nullptr;  // in bytes
    int num = 0;
    const char *regions[2] = {};
    int bytes = 0;  // of a piece

    int num_lines() const { return 2 * num * ((bytes + LINE - 1) / LINE); }
    // Number `number` of `total` parts of them.
    Pieces part(int number, int total) const {
        const int begin = num * number / total, end = num * (number + 1) / total;
        return {places + begin, end - begin, {regions[0], regions[1]}, bytes};
    }
};

// Asks for pieces, as many lines at a time as it takes to have asked for all of them after so many times.
class PieceFetch {
  public:
    PieceFetch() = default;
    PieceFetch(const Pieces &pieces, int times)
        : pieces_(pieces), lines_((pieces.num_lines() + times - 1) / times) {}

    void more() {
        for (int i = 0; i < lines_; i++, at_ += LINE) {
            if (at_ >= end_ && !begin_next()) return;
            ask_for(at_);
        }
    }

  private:
    bool begin_next() {
        if (next_ == 2 * pieces_.num) return false;
        at_ = pieces_.regions[next_ % 2] + pieces_.places[next_ / 2];
        end_ = at_ + pieces_.bytes;
        next_++;
        return true;
    }

    Pieces pieces_;
    int lines_ = 0, next_ = 0;
    const char *at_ = nullptr, *end_ = nullptr;
};

// Asks for memory that is read later: `share` bytes at a time of what is ahead, as a panel has room in the second cache,
// and what is next of the pieces.
struct Fetch {
    const uint8_t *ahead;
    size_t share;  // 0: nothing
    PieceFetch *pieces;  // may be null

    // Beside so many rows.
    template <int R>
    void more() {
        more(share);
        if (R > FEW_ROWS && pieces != nullptr) pieces->more();
    }
    void more(size_t size) {
        if (share == 0) return;
        for (size_t at = 0; at < size; at += 64) ask_for(ahead + at);
        ahead += size;
    }
};

// sums[r * stride + o] of W outputs.
template <int R, int BITS, int BLOCK>
static inline void block_tile(
    const QuantizedRows &rows, int first, const uint8_t *data, int num_blocks, Fetch &fetch, float *sums, int stride) {
    constexpr int STEPS = BLOCK / 4, PER_SCALE = ROW_BLOCK / BLOCK;
    const float *row_sums = rows.sums + first;
    Vec total[R] = {};
    for (int b = 0; b < num_blocks; b++, row_sums += rows.stride) {
        const size_t place = b / PER_SCALE * rows.stride + first;
        const int8_t *numbers = rows.numbers + place * ROW_BLOCK + b % PER_SCALE * BLOCK;
        const float *row_scales = rows.scales + place;
        const uint16_t *halves = reinterpret_cast<const uint16_t *>(data);
        const Vec scale = load_halves(halves), minimum = load_halves(halves + W);
        data += 2 * W * sizeof(uint16_t);
        fetch.more<R>();
        WholeSum<BITS> whole[R];
#pragma GCC unroll 8
        for (int s = 0; s < (BITS == 4 ? STEPS / 2 : STEPS); s++, data += 4 * W) {
            const ByteVec bytes = load_bytes(data);
            if constexpr (BITS == 8) {
#pragma GCC unroll 12
                for (int r = 0; r < R; r++)
                    whole[r].add(bytes, four_of(numbers + r * ROW_BLOCK + 4 * s));
            } else {
                const ByteVec low = bytes & 15, high = bytes >> 4;
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) {
                    const int8_t *x = numbers + r * ROW_BLOCK + 4 * s;
                    whole[r].add(low, four_of(x));
                    whole[r].add(high, four_of(x + BLOCK / 2));
                }
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            total[r] += minimum * row_sums[r];
            total[r] += __builtin_convertvector(whole[r].value(), Vec) * (scale * row_scales[r]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) store(sums + r * stride, total[r]);
}

static inline float half_to_float(uint16_t bits) {
    uint16_t halves[W] = {bits};
    return load_halves(halves)[0];
}

// One output's weights of a strip, as floats: out [in].
static inline void unpack_halves(const uint8_t *data, int o, int in, int bits, int block, float *out) {
    const int half_block = block / 2;
    for (int at = 0; at < in; at += block, data += block_bytes(bits, block)) {
        uint16_t halves[2];
        memcpy(halves, data + 2 * o, sizeof *halves);
        memcpy(halves + 1, data + 2 * (W + o), sizeof *halves);
        const float scale = half_to_float(halves[0]), minimum = half_to_float(halves[1]);
        for (int i = 0; i < block; i += 4) {
            const uint8_t *four = data + 4 * W + (bits == 4 ? i % half_block : i) * W + 4 * o;
            for (int j = 0; j < 4; j++) {
                const int number = bits == 8 ? four[j] : i < half_block ? four[j] & 15 : four[j] >> 4;
                out[at + i + j] = scale * float(number) + minimum;
            }
        }
    }
}
