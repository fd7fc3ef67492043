// Plans one layer: which algorithm is used when.
#pragma once

#include <vector>

#include "planning/even_split.h"
#include "planning/headroom_swaps.h"
#include "planning/plan_layers.h"
#include "planning/share_rounding.h"

namespace equipoise {

// Each call plans one layer and writes its rows of the result. Memory is reused from layer to
// layer, so a planner belongs to one thread.
class LayerPlanner {
 public:
    LayerPlanner(const PlanRequest& request, const PlanResult& result);

    // Plans anew. What is installed only decides which rank and slot gets which name.
    void plan_anew(std::int64_t layer);

    // Keeps the installed placement, unless the layer is above twice the target, or its highest
    // risk can be lowered by more than the target: then improves it at once. Returns whether it was
    // kept.
    bool keep(std::int64_t layer);

    // Improves the installed placement within the layer's allowance.
    void improve(std::int64_t layer);

 private:
    // Result of an attempt: the height of the fullest rank, and the copies that are left.
    struct Attempt {
        std::int64_t height, left;
    };

    Ids installed(std::int64_t layer) const;
    bool ranks_are_alike() const;
    void propose(std::int64_t layer);
    void reset(std::int64_t layer, Ids placement);
    std::int64_t improve_state(std::int64_t layer);
    std::int64_t make_headroom(std::int64_t layer, std::int64_t height, std::int64_t copies);
    bool reduce_risk(std::int64_t layer, std::int64_t gain, std::int64_t copies);
    Attempt try_improvement(std::int64_t copies);
    void save_placement(std::vector<std::int32_t>& placement) const;
    void restore(const std::vector<std::int32_t>& placement);
    std::int64_t divide_load();
    void return_to_slots(Ids installed);
    std::int64_t target_height() const;
    std::int64_t far_height() const;
    bool is_far_off();
    bool level_shares() const { return request_.options.split == Split::kLevel; }
    void write(std::int64_t layer);
    std::int64_t count_layer_moves(std::int64_t layer) const;

    const PlanRequest& request_;
    const PlanResult& result_;
    LayerState state_;
    MaxFlowLeveller leveller_;
    IncrementalPlanner incremental_;
    EvenSplitPlanner even_split_;
    CovarianceSwaps covariance_;
    HeadroomSwaps headroom_;
    ShareRounding rounding_;
    std::vector<std::int32_t> proposed_, before_attempt_, first_attempt_;
};

}  // namespace equipoise
