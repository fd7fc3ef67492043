// The lowest peak that shares can reach on a placement.
#pragma once

#include <cstdint>
#include <vector>

#include "planning/layer_state.h"

namespace equipoise {

// First along a tree that spans the ranks, from its leaves to its root: where no copy runs dry all
// ranks are level then. What is left pours along chains of copies, from ranks that are too full to
// ranks that are not: a maximum flow, each chain a shortest one (Edmonds and Karp, 1972). Where
// nothing more can leave a set of ranks, no shares can bring the peak below what they hold divided
// by their capacity, and the height that is aimed at rises to that (Newton's step, as Dinkelbach,
// 1967, for ratios): so the peak is the optimum of the linear program, to within the rounding of
// 1 / 65536 of a token.
class MaxFlowLeveller {
 public:
    explicit MaxFlowLeveller(LayerState& state);

    // Until no ordinary rank is fuller than `height`, which is the mean at least, or as near as can
    // be. Returns the height that was reached; or, early, one above `enough` that cannot be gone
    // below.
    std::int64_t level(std::int64_t height, std::int64_t enough = INT64_MAX);
    // As level as can be, to a part in 8192 of the mean: 0.00012.
    std::int64_t level_all(std::int64_t enough = INT64_MAX) {
        return level(state_.mean() + state_.mean() / 8192, enough);
    }

    // The ranks that kept the last level() from its aim: nothing can leave them together. Empty
    // when it was reached.
    const std::vector<std::int32_t>& binding() const { return binding_; }

 private:
    // How a rank was found: load would be poured from one copy of an expert to another, here.
    struct Edge {
        std::int32_t from_slot, to_slot;
    };

    std::size_t find_overfull(std::int64_t height);
    void sort_overfull();
    void level_along_tree(std::int64_t height);
    void grow_tree(std::int32_t rank);
    void begin_search();
    void mark_found(std::int32_t rank, Edge edge);
    Ids push_excess(std::int32_t rank, std::int64_t height);
    bool expand_slot(std::int32_t slot, std::int32_t rank, std::int64_t height);
    bool push_along_path(std::int32_t rank, std::int32_t end, std::int64_t height);

    LayerState& state_;
    std::vector<std::int32_t> overfull_, visited_, queue_, binding_;
    std::vector<Edge> found_by_;
    std::int32_t search_ = 0;
};

}  // namespace equipoise
