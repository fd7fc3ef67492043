#include "planning/incremental.h"

#include <algorithm>

namespace equipoise {
namespace {

// Ends after so many changes in a row that lower nothing. Not after the first: several sets of
// ranks may be equally high, and each needs a change of its own before the peak falls.
constexpr std::int32_t kPatience = 8;
// A layer that misses the target is improved to three quarters of it: at the target itself, the
// noise of the next window would miss it again and copy again.
constexpr std::int32_t kAimNumerator = 3, kAimDenominator = 4;
// Changes of a call that are for the slack. The target is what counts: slack only prepares for
// batches that are more uneven than the window.
constexpr std::int32_t kSlackChanges = 1;

}  // namespace

IncrementalPlanner::IncrementalPlanner(LayerState& state, const RankTopology& topology,
                                       const PlanOptions& options)
    : state_(state),
      topology_(topology),
      options_(options),
      leveller_(state),
      trades_(state, topology, options.node_cost),
      swaps_(state, topology),
      single_load_(topology.shape.ranks),
      open_(topology.shape.ranks, 1) {}

std::int64_t IncrementalPlanner::run(std::int64_t copies) {
    copies_left_ = copies;
    mean_ = state_.mean();
    traded_ = false;
    target_ =
        static_cast<std::int32_t>(std::int64_t{options_.target} * kAimNumerator / kAimDenominator);
    if (mean_ > 0 && missed_target() > 0) change_placement();
    leveller_.level_all();
    return copies_left_;
}

void IncrementalPlanner::change_placement() {
    save_best(missed_by_);
    trades_.reset();
    while (copies_left_ > 0 && trade_replica()) {
    }
    lower_peak();
    if (missed_by_ > best_miss_)
        state_.set_placement({best_placement_.data(), best_placement_.size()});
}

bool IncrementalPlanner::trade_replica() {
    const std::int32_t hot = trades_.hottest();
    if (hot < 0) return false;
    const std::int64_t heat = trades_.load_per_replica(hot);
    // What the other expert may have per replica afterwards. With the hysteresis, experts of nearly
    // the same load do not trade replicas back and forth from window to window.
    const auto most = static_cast<std::int64_t>(static_cast<__int128>(heat) * kShareOne /
                                                (kShareOne + options_.hysteresis));
    if (most >= heat) return false;
    std::fill(open_.begin(), open_.end(), 1);
    return give_slot(trades_.find_slot_for(hot, most, open_), hot);
}

bool IncrementalPlanner::give_slot(std::int32_t slot, std::int32_t expert) {
    if (slot < 0) return false;
    const std::int32_t victim = state_.expert_at(slot);
    state_.replace(slot, expert);
    trades_.update(victim);
    trades_.update(expert);
    --copies_left_;
    traded_ = true;
    return true;
}

// Changes the placement until target and slack are met, nothing helps or no copies are left.
void IncrementalPlanner::lower_peak() {
    std::int64_t least = missed_target();
    // Trades are kept if they made nothing worse: they put replicas where the load is now.
    if (traded_ && least <= best_miss_) save_best(least);
    std::int32_t idle = 0, slack = kSlackChanges;
    while (least > 0 && idle < kPatience && (misses_target_ || slack-- > 0) && change_once()) {
        const std::int64_t now = missed_target();
        idle = now < least ? 0 : idle + 1;
        least = std::min(least, now);
        if (now < best_miss_) save_best(now);
    }
}

void IncrementalPlanner::save_best(std::int64_t missed_by) {
    const Ids placement = state_.placement();
    best_placement_.assign(placement.begin(), placement.end());
    best_miss_ = missed_by;
}

// Returns how far target or slack are missed, 0 if both are met. Leaves the flows level.
std::int64_t IncrementalPlanner::missed_target() {
    const std::int64_t over = level_flows() - mean_ - fraction_of(mean_, target_);
    misses_target_ = over > 0;
    // Adding the mean makes any placement that misses the target worse than any that misses the
    // slack.
    return missed_by_ = misses_target_ ? over + mean_ : missed_slack();
}

// Returns how far the slack is missed, by the rank that misses it most.
std::int64_t IncrementalPlanner::missed_slack() {
    state_.sum_single_replicas(single_load_);
    const std::int64_t room = mean_ - fraction_of(mean_, options_.slack);
    std::int64_t worst = 0;
    for (std::int32_t r = 0; r < topology_.shape.ranks; ++r) {
        const std::int64_t missed = single_load_[r] - state_.load_at(room, r);
        if (missed <= worst) continue;
        worst = missed;
        slack_rank_ = r;
    }
    return worst;
}

// Levels the flows. Returns the peak, and keeps the ranks that hold it up.
std::int64_t IncrementalPlanner::level_flows() {
    const std::int64_t height = leveller_.level(mean_ + fraction_of(mean_, target_));
    binding_ = leveller_.binding();
    return height;
}

// Makes one change that takes load out of the bottleneck. Returns false if there is none.
bool IncrementalPlanner::change_once() {
    find_bottleneck();
    const std::int32_t hot = hottest_expert_inside();
    const std::int64_t heat = hot < 0 ? 0 : state_.load_of(hot) / replica_count(hot);
    const std::int32_t slot =
        hot < 0 || replica_count(hot) >= topology_.replica_range().high || copies_left_ < 1
            ? -1
            : trades_.find_slot_for(hot, heat - 1, open_);
    const std::int64_t gain = slot < 0 ? 0 : std::min(excess_, load_of_next_replica(hot));
    // A swap gains the excess at most and costs two copies: if the replica gains half of it for one
    // copy, no swap need be looked for.
    if (2 * gain >= excess_ && gain > 0) return give_slot(slot, hot);
    return swap_experts(2 * gain) || (gain > 0 && give_slot(slot, hot));
}

bool IncrementalPlanner::swap_experts(std::int64_t more_than) {
    if (copies_left_ < 2) return false;
    state_.sum_single_replicas(single_load_);
    const ExpertSwap swap = swaps_.best({inside_, open_, single_load_, excess_, mean_}, more_than);
    if (swap.from < 0) return false;
    state_.swap(swap.from, swap.to);
    copies_left_ -= 2;
    return true;
}

// The load that another replica could take out of the bottleneck.
std::int64_t IncrementalPlanner::load_of_next_replica(std::int32_t expert) const {
    return state_.load_of(expert) / (replica_count(expert) + 1);
}

std::int64_t IncrementalPlanner::replica_count(std::int32_t expert) const {
    return static_cast<std::int64_t>(state_.replicas(expert).size);
}

// Finds the ranks that hold the peak up, and how much load has to leave them. Where only the slack
// is missed that is one rank.
void IncrementalPlanner::find_bottleneck() {
    std::fill(open_.begin(), open_.end(), 1);
    excess_ = 0;
    inside_.assign(1, slack_rank_);
    if (misses_target_) {
        inside_ = binding_;
        for (std::int32_t r : inside_) excess_ += state_.rank_load(r) - state_.load_at(mean_, r);
    } else {
        const std::int64_t room = mean_ - fraction_of(mean_, options_.slack);
        // With a 64th of the mean as a margin.
        excess_ = single_load_[slack_rank_] - state_.load_at(room, slack_rank_) + mean_ / 64;
    }
    for (std::int32_t r : inside_) open_[r] = 0;
}

std::int32_t IncrementalPlanner::hottest_expert_inside() const {
    std::int32_t hot = -1;
    std::int64_t heat = 0;
    const std::int32_t per_rank = topology_.shape.per_rank();
    for (std::int32_t r : inside_)
        for (std::int32_t s = r * per_rank; s < (r + 1) * per_rank; ++s) {
            const std::int32_t e = state_.expert_at(s);
            const std::int64_t copies = replica_count(e);
            // Most experts have one replica: nothing is divided for them.
            const std::int64_t here = copies == 1 ? state_.load_of(e) : state_.load_of(e) / copies;
            // Shares can move the load of experts with several replicas: they do not miss the
            // slack.
            if (here > heat && (misses_target_ || copies == 1)) {
                heat = here;
                hot = e;
            }
        }
    return hot;
}

}  // namespace equipoise
