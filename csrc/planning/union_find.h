// Which ranks are connected.
#pragma once

#include <numeric>
#include <vector>

#include "common/span.h"

namespace equipoise {

// Disjoint sets of ranks.
class Components {
 public:
    explicit Components(std::int32_t ranks) : parent_(ranks), count_(ranks) { clear(); }

    void clear() {
        std::iota(parent_.begin(), parent_.end(), 0);
        count_ = static_cast<std::int32_t>(parent_.size());
    }
    std::int32_t root(std::int32_t rank) {
        while (parent_[rank] != rank) rank = parent_[rank] = parent_[parent_[rank]];
        return rank;
    }
    void join(std::int32_t a, std::int32_t b) {
        a = root(a);
        b = root(b);
        count_ -= a != b;
        parent_[a] = b;
    }
    std::int32_t count() const { return count_; }

 private:
    std::vector<std::int32_t> parent_;
    std::int32_t count_;
};

}  // namespace equipoise
