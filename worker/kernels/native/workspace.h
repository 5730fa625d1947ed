// Memory of a call's activations, kept from call to call so that its pages are there; large ones, where the system has
// them, as a product writes to as many places as there are rows.
#pragma once

#include <sys/mman.h>

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
    static constexpr std::align_val_t PAGE{2 << 20};

    struct Free {
        void operator()(float *memory) const { ::operator delete(memory, PAGE); }
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
        const size_t page = size_t(PAGE) / sizeof(float), whole = (size + page - 1) / page * page;
        slabs_.push_back({std::unique_ptr<float, Free>(
            static_cast<float *>(::operator new(whole * sizeof(float), PAGE))), whole});
        madvise(slabs_.back().memory.get(), whole * sizeof(float), MADV_HUGEPAGE);  // refused where there are none
    }

    std::vector<Slab> slabs_;
    size_t used_ = 0;
    Buffer reused_[8] = {};
};
