// Union-find: which ranks are connected by replicas.
#pragma once

#include <numeric>
#include <vector>

#include "common/span.h"

namespace equipoise {

// Disjoint sets of the numbers 0 to size - 1.
class UnionFind {
 public:
    explicit UnionFind(std::int32_t size) : parent_(size), count_(size) { clear(); }

    void clear() {
        std::iota(parent_.begin(), parent_.end(), 0);
        count_ = static_cast<std::int32_t>(parent_.size());
    }
    // Halves the path on the way, so that chains stay short without ranks of sets.
    std::int32_t find(std::int32_t element) {
        while (parent_[element] != element) element = parent_[element] = parent_[parent_[element]];
        return element;
    }
    void unite(std::int32_t a, std::int32_t b) {
        a = find(a);
        b = find(b);
        count_ -= a != b;
        parent_[a] = b;
    }
    // Number of sets.
    std::int32_t count() const { return count_; }

 private:
    std::vector<std::int32_t> parent_;
    std::int32_t count_;
};

}  // namespace equipoise
