// Where a row has its largest output, found while a product makes them: a greedy token, of logits that are nowhere.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>

#include "vector.h"

// The largest of some outputs, +inf where one is NaN, and the first that is as large. They may be seen in any order.
struct Best {
    float value = -INFINITY;
    int32_t output = INT_MAX;

    void see(float other, int32_t at) {
        if (other != other) other = INFINITY;
        if (other > value || (other == value && at < output)) *this = {other, at};
    }

    // `num` outputs from `first` on, of which hardly any is as large as the best one so far.
    void see(Vec values, int num, int32_t first) {
        if (all_below(values, value)) return;
        for (int lane = 0; lane < std::min(num, W); lane++) see(values[lane], first + lane);
    }
};
