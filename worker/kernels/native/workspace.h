// Memory of a call's activations, kept from call to call so that its pages are there.
#pragma once

#include <memory>
#include <numeric>
#include <vector>

#include "vector.h"

class Workspace {
  public:
    // All that was handed out may be handed out again. What did not fit into one piece last time will now.
    void reset() {
        if (slabs_.size() > 1) {
            size_t total = 0;
            for (const auto &slab : slabs_) total += slab.size;
            slabs_.clear();
            add_slab(total);
        }
        used_ = 0;
        for (auto &buffer : reused_) buffer = {};
    }

    // Of undefined content, and W floats behind it that may be read.
    float *floats(size_t size) {
        const size_t needed = (size + 2 * 16 - 1) / 16 * 16;  // whole cache lines
        if (slabs_.empty() || slabs_.back().size - used_ < needed) {
            add_slab(needed);
            used_ = 0;
        }
        float *place = slabs_.back().memory.get() + used_;
        used_ += needed;
        return place;
    }

    // The same memory for each call with this number, unless it asks for more than before.
    float *reused(int number, size_t size) {
        Buffer &buffer = reused_[number];
        if (buffer.size < size) buffer = {floats(size), size};
        return buffer.place;
    }

  private:
    struct Free {
        void operator()(float *memory) const { ::operator delete(memory, std::align_val_t(64)); }
    };
    struct Slab {
        std::unique_ptr<float, Free> memory;
        size_t size;
    };
    struct Buffer {
        float *place;
        size_t size;
    };

    void add_slab(size_t size) {
        size = size < (1 << 18) ? 1 << 18 : size;
        slabs_.push_back({std::unique_ptr<float, Free>(
            static_cast<float *>(::operator new(size * sizeof(float), std::align_val_t(64)))), size});
    }

    std::vector<Slab> slabs_;
    size_t used_ = 0;
    Buffer reused_[8] = {};
};
