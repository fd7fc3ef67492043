#include "planning/layer_planner.h"

#include <algorithm>

#include "planning/connected.h"
#include "planning/greedy.h"
#include "planning/slot_alignment.h"

namespace equipoise {
namespace {

// An attempt is kept if it lowers the peak by this part of the target. With no such bound the same
// load would go on changing something at every call.
constexpr std::int32_t kMinGainDivisor = 8;
// More than this part of the slots counts as many copies.
constexpr std::int32_t kManyCopiesDivisor = 8;

}  // namespace

LayerPlanner::LayerPlanner(const PlanRequest& request, const PlanResult& result)
    : request_(request),
      result_(result),
      state_(request.topology.shape, request.topology.capacity),
      leveller_(state_),
      incremental_(state_, request.topology, request.options),
      even_split_(state_, request.topology, request.options),
      covariance_(state_, request.topology, request.options, request.windows),
      headroom_(state_, request.topology, request.options),
      rounding_(state_),
      proposed_(request.topology.shape.slots) {}

void LayerPlanner::plan_anew(std::int64_t layer) {
    propose(layer);
    reset(layer, {proposed_.data(), proposed_.size()});
    divide_load();
    if (request_.policy != PlanPolicy::kGreedy) {
        // Everything is copied anyway, so improving costs nothing, and small gains in risk are
        // taken too.
        if (is_far_off()) improve_state(layer);
        reduce_risk(layer, state_.mean() / 1024, INT64_MAX);
    }
    write(layer);
}

bool LayerPlanner::keep(std::int64_t layer) {
    reset(layer, installed(layer));
    const std::int64_t copies = request_.allowance[layer];
    bool stays = copies == 0 || !is_far_off();
    std::int64_t left = copies;
    if (!stays) left = improve_state(layer);
    if (copies == 0) divide_load();
    if (reduce_risk(layer, fraction_of(state_.mean(), request_.options.target), left))
        stays = false;
    write(layer);
    return stays;
}

void LayerPlanner::improve(std::int64_t layer) {
    reset(layer, installed(layer));
    const std::int64_t left = improve_state(layer);
    reduce_risk(layer, fraction_of(state_.mean(), request_.options.target), left);
    write(layer);
}

Ids LayerPlanner::installed(std::int64_t layer) const {
    const auto slots = static_cast<std::size_t>(request_.topology.shape.slots);
    if (request_.installed == nullptr) return {nullptr, 0};
    return {request_.installed + layer * slots, slots};
}

void LayerPlanner::reset(std::int64_t layer, Ids placement) {
    state_.clear_change_limit();
    state_.reset(request_.load_of(layer), placement);
    // A plan made anew changes most slots, and has no limit. A limit as high as the slots of a rank
    // is none either, and is not counted.
    if (request_.policy == PlanPolicy::kIncremental && request_.installed != nullptr &&
        request_.per_rank < request_.topology.shape.per_rank())
        state_.limit_changes(placement, request_.per_rank);
}

// Attempts improvements until the target is met or an attempt gains too little for its copies,
// which is undone. So planning again with the same load changes nothing. Returns how many copies of
// the allowance are left.
std::int64_t LayerPlanner::improve_state(std::int64_t layer) {
    const std::int64_t min_gain =
        fraction_of(state_.mean(), request_.options.target / kMinGainDivisor);
    std::int64_t left = request_.allowance[layer];
    // Duplicates are wasted slots, whatever the peak.
    if (!level_shares() && even_split_.has_duplicates()) left = even_split_.run(left);
    std::int64_t height = divide_load();
    while (height > target_height() && left > 0) {
        const Attempt attempt = try_improvement(left);
        if (attempt.height + min_gain >= height) {
            restore(before_attempt_);
            break;
        }
        height = attempt.height;
        left = attempt.left;
        // Before the next attempt, because the order of slots breaks ties: the next attempt and the
        // next call have to start from the same order.
        return_to_slots(installed(layer));
    }
    return make_headroom(layer, height, left);
}

// Swaps experts of a layer that changes anyway, so that its shares have room to level batches. A
// layer that stays is left alone: planning again with the same load changes nothing. Undone if
// shares no longer level the load of the plan. Returns how many copies are left.
std::int64_t LayerPlanner::make_headroom(std::int64_t layer, std::int64_t height,
                                         std::int64_t copies) {
    const Ids before = installed(layer), now = state_.placement();
    if (request_.options.headroom == 0 || !level_shares() || before.data == nullptr ||
        std::equal(now.begin(), now.end(), before.begin()))
        return copies;
    save_placement(before_attempt_);
    const std::int64_t left = headroom_.run(copies);
    if (divide_load() > std::max(height, target_height())) {
        restore(before_attempt_);
        return copies;
    }
    return_to_slots(before);
    return left;
}

// One attempt with the algorithm that goes with the split. If level shares stay far off, or miss
// the target with many copies, also with the algorithm for even shares: level shares on its
// placement are at least as level as even ones. It mostly takes more copies, which only a layer
// that is far off is worth.
LayerPlanner::Attempt LayerPlanner::try_improvement(std::int64_t copies) {
    save_placement(before_attempt_);
    if (!level_shares()) {
        const std::int64_t left = even_split_.run(copies);
        return {divide_load(), left};
    }
    const std::int64_t left = incremental_.run(copies);
    const Attempt first{divide_load(), left};
    const bool many_copies =
        copies - first.left > request_.topology.shape.slots / kManyCopiesDivisor;
    if (first.height <= target_height() || (first.height <= far_height() && !many_copies))
        return first;
    save_placement(first_attempt_);
    state_.set_placement({before_attempt_.data(), before_attempt_.size()});
    const std::int64_t rest = even_split_.run(copies);
    const Attempt second{divide_load(), rest};
    const bool worth_it = first.height > far_height() || second.left >= first.left;
    if (second.height < first.height && worth_it) return second;
    restore(first_attempt_);
    return first;
}

void LayerPlanner::save_placement(std::vector<std::int32_t>& placement) const {
    const Ids now = state_.placement();
    placement.assign(now.begin(), now.end());
}

void LayerPlanner::restore(const std::vector<std::int32_t>& placement) {
    state_.set_placement({placement.data(), placement.size()});
    divide_load();
}

// Divides the load among replicas as the split says. Returns the height of the fullest rank.
std::int64_t LayerPlanner::divide_load() {
    return level_shares() ? leveller_.level_all() : even_split_.peak();
}

// Moves experts that are busy together apart. Returns whether that changed the placement. Levelling
// afterwards changes shares, and with them the risk: if it fell by less than `gain` in the end, the
// swaps are undone, so that planning again with the same load changes nothing.
bool LayerPlanner::reduce_risk(std::int64_t layer, std::int64_t gain, std::int64_t copies) {
    if (!covariance_.enabled()) return false;
    save_placement(before_attempt_);
    const std::int64_t risk = covariance_.highest_risk(layer);
    if (covariance_.run(layer, gain, copies) == 0) return false;
    divide_load();
    if (covariance_.highest_risk(layer) + gain < risk) return true;
    restore(before_attempt_);
    return false;
}

// Puts every expert that is still on its rank, or is again, back into its installed slot, so that
// nothing is copied for it.
void LayerPlanner::return_to_slots(Ids installed) {
    const Ids now = state_.placement();
    // In steady windows most layers are as they were.
    if (installed.data == nullptr || std::equal(now.begin(), now.end(), installed.begin())) return;
    const auto size = static_cast<std::int32_t>(request_.topology.shape.per_rank());
    const auto slots = static_cast<std::int32_t>(installed.size);
    for (std::int32_t s = 0; s < slots; ++s) {
        const std::int32_t first = s / size * size;
        for (std::int32_t t = first; t < first + size; ++t) {
            const std::int32_t expert = state_.expert_at(s);
            if (expert == installed[s]) break;
            // Every swap puts an expert where it was, so none is undone, and the search may start
            // over.
            if (expert == installed[t] && state_.expert_at(t) != expert) {
                state_.swap(s, t);
                t = first - 1;
            }
        }
    }
}

// The height that meets the target.
std::int64_t LayerPlanner::target_height() const {
    return state_.mean() + fraction_of(state_.mean(), request_.options.target);
}

// The height from which a layer is improved whatever the other layers do.
std::int64_t LayerPlanner::far_height() const {
    return state_.mean() + 2 * fraction_of(state_.mean(), request_.options.target);
}

// Whether the peak is above far_height(), or slots are wasted. Leaves the load divided if it is
// not.
bool LayerPlanner::is_far_off() {
    if (level_shares()) return leveller_.level_all(far_height()) > far_height();
    return even_split_.peak() > far_height() || even_split_.has_duplicates();
}

// Writes a placement made anew to proposed_.
void LayerPlanner::propose(std::int64_t layer) {
    const Counts load = request_.load_of(layer);
    const Ids before = installed(layer);
    const std::int64_t ranks = request_.topology.shape.ranks;
    const Span<std::int32_t> fresh{proposed_.data(), proposed_.size()};
    if (request_.policy == PlanPolicy::kGreedy)
        plan_greedy(load, ranks, fresh);
    else
        plan_connected(load, request_.topology, fresh);
    // Names of ranks may change only if ranks are alike.
    if (before.data == nullptr || !ranks_are_alike()) return;
    const std::vector<std::int32_t> proposed = proposed_;
    align_slots(before, {proposed.data(), proposed.size()}, ranks, fresh);
}

bool LayerPlanner::ranks_are_alike() const {
    const Ids capacity = request_.topology.capacity;
    const bool same =
        std::all_of(capacity.begin(), capacity.end(), [&](auto c) { return c == capacity[0]; });
    const RankTopology& topology = request_.topology;
    return same &&
           (topology.survive != Survive::kNodeLoss || topology.nodes == topology.shape.ranks);
}

void LayerPlanner::write(std::int64_t layer) {
    const std::int64_t slots = request_.topology.shape.slots;
    const Span<std::int32_t> shares{result_.shares + layer * slots,
                                    static_cast<std::size_t>(slots)};
    return_to_slots(installed(layer));
    const Ids placement = state_.placement();
    std::copy(placement.begin(), placement.end(), result_.placement + layer * slots);
    // Levelled again, so that the other experts make up for what was rounded.
    if (level_shares() && rounding_.fix_coarse()) leveller_.level_all();
    result_.imbalance[layer] = rounding_.round(shares);
    result_.moves[layer] = count_layer_moves(layer);
}

std::int64_t LayerPlanner::count_layer_moves(std::int64_t layer) const {
    const Ids before = installed(layer), after = state_.placement();
    if (before.data == nullptr) return static_cast<std::int64_t>(after.size);
    if (std::equal(before.begin(), before.end(), after.begin())) return 0;
    return count_moves(before, after, request_.topology.shape.ranks);
}

}  // namespace equipoise
