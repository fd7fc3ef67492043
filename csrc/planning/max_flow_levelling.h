// The lowest peak that shares can reach on a placement, as a maximum flow.
#pragma once

#include <cstdint>
#include <vector>

#include "planning/layer_state.h"

namespace equipoise {

// Ranks are the nodes of a flow network, and every two replicas of an expert an edge between
// theirs.
//
// 1. Along a spanning tree, from the leaves to the root, each rank passes on what it has too much
//    or too little. If no flow runs out, all ranks are level after this one pass.
// 2. What is left is a maximum flow: load is pushed from ranks above the height to ranks below it,
//    along shortest paths (Edmonds and Karp, 1972).
// 3. If no path leads out of a set of ranks (a minimum cut), no shares can bring the peak below
//    their load divided by their capacity. The height that is aimed at rises to that, and the
//    search goes on (Newton's step for a ratio: Dinkelbach, 1967).
//
// The result is the optimum of the linear program, to within 1 / 65536 of a token.
class MaxFlowLeveller {
 public:
    explicit MaxFlowLeveller(LayerState& state);

    // Levels until no rank is above `height`, which is the mean or more, or as low as can be.
    // Returns the height that was reached. Returns early, with the flows not yet level, once it is
    // clear that the height stays above `enough`.
    std::int64_t level(std::int64_t height, std::int64_t enough = INT64_MAX);
    // Levels to within 1 / 8192 of the mean (0.00012), far below the default target of 0.02: the
    // rest would cost searches for nothing.
    std::int64_t level_all(std::int64_t enough = INT64_MAX) {
        return level(state_.mean() + state_.mean() / 8192, enough);
    }

    // The ranks that kept the last level() above its aim: no load can leave them as a whole. Empty
    // if it was reached.
    const std::vector<std::int32_t>& binding() const { return binding_; }

 private:
    // How the search found a rank: load would move from `from_slot` to `to_slot`, which is on it.
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
    std::int32_t search_ = 0;  // number of the search: visited_ need not be cleared for each
};

}  // namespace equipoise
