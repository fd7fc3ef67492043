#include "planning/even_split.h"

#include <algorithm>

namespace equipoise {
namespace {

// How many slots are looked at to be handed over: those of the coldest replicas, which are missed
// least.
constexpr std::size_t kMaxSpareSlots = 128;
// Below every gain: a duplicate is replaced even if the squares grow.
constexpr std::int64_t kNoGain = INT64_MIN;
// Changes of a layer at most, per slot.
constexpr std::int32_t kChangesPerSlot = 1;

}  // namespace

EvenSplitPlanner::EvenSplitPlanner(LayerState& state, const RankTopology& topology,
                                   const PlanOptions& options)
    : state_(state), topology_(topology), options_(options), change_(topology.shape.ranks) {}

std::int64_t EvenSplitPlanner::run(std::int64_t copies) {
    copies_left_ = copies;
    shift_ = state_.square_shift();
    replace_duplicates();
    const std::int64_t goal = state_.mean() + fraction_of(state_.mean(), options_.target);
    std::int64_t least = peak();
    if (least <= goal) return copies_left_;
    const auto keep = [&] {
        const Ids placement = state_.placement();
        best_placement_.assign(placement.begin(), placement.end());
        least = peak();
    };
    keep();
    // Gains are computed from shifted loads, so with few rows changes may undo each other for ever.
    // The bound is far beyond the changes that level a layer of many rows.
    std::int32_t steps = kChangesPerSlot * topology_.shape.slots;
    while (steps-- > 0 && split_hottest()) {
    }
    for (bool going = true; going;) {
        if (peak() < least) keep();
        going = least > goal && steps-- > 0 && relieve_fullest();
    }
    state_.set_placement({best_placement_.data(), best_placement_.size()});
    return copies_left_;
}

std::int64_t EvenSplitPlanner::peak() const {
    const std::int32_t rank = fullest();
    return state_.height_of(state_.rank_load(rank), state_.capacity(rank));
}

std::int32_t EvenSplitPlanner::fullest() const {
    std::int32_t found = 0;
    std::int64_t most = -1;
    for (std::int32_t r = 0; r < topology_.shape.ranks; ++r) {
        const std::int64_t height = state_.height_of(state_.rank_load(r), state_.capacity(r));
        if (height <= most) continue;
        most = height;
        found = r;
    }
    return found;
}

bool EvenSplitPlanner::has_duplicates() const {
    for (std::int32_t e : state_.replicated_experts()) {
        std::int32_t before = -1;
        for (std::int32_t slot : state_.replicas(e)) {
            if (state_.rank_of(slot) == before) return true;
            before = state_.rank_of(slot);
        }
    }
    return false;
}

// Gives each duplicate to the expert that gains most by it.
void EvenSplitPlanner::replace_duplicates() {
    if (!has_duplicates()) return;
    experts_.resize(topology_.shape.experts);
    for (std::int32_t e = 0; e < topology_.shape.experts; ++e) experts_[e] = e;
    for (std::int32_t slot = 0; slot < topology_.shape.slots && copies_left_ > 0; ++slot) {
        const std::int32_t expert = state_.expert_at(slot), rank = state_.rank_of(slot);
        const Ids copies = state_.replicas(expert);
        const auto here = [&](auto s) { return state_.rank_of(s) == rank; };
        if (std::count_if(copies.begin(), copies.end(), here) < 2) continue;
        const Change change =
            best_handover({experts_.data(), experts_.size()}, {&slot, 1}, HeatGap::kAny);
        if (change.slot >= 0) hand_over(change.slot, change.other);
    }
}

// Gives one more slot to the expert with the largest replicas. Returns false if none is large.
bool EvenSplitPlanner::split_hottest() {
    std::int32_t hot = -1;
    std::int64_t most = state_.mean() / 2;
    for (std::int32_t e = 0; e < topology_.shape.experts; ++e) {
        const auto copies = static_cast<std::int32_t>(state_.replicas(e).size);
        // A replica takes no more than the load: most experts are skipped without a division.
        if (state_.load_of(e) <= most || copies >= topology_.shape.ranks ||
            load_per_replica(e, 0) <= most)
            continue;
        most = load_per_replica(e, 0);
        hot = e;
    }
    if (hot < 0 || copies_left_ < 1) return false;
    find_spare_slots(-1);
    const Change change =
        best_handover({&hot, 1}, {slots_.data(), slots_.size()}, HeatGap::kMuchColder);
    if (change.slot < 0) return false;
    hand_over(change.slot, hot);
    return true;
}

// Makes one change for the fullest rank. Returns false if nothing helps.
bool EvenSplitPlanner::relieve_fullest() {
    const std::int32_t rank = fullest(), per_rank = topology_.shape.per_rank();
    const Ids here{state_.placement().data + rank * per_rank, static_cast<std::size_t>(per_rank)};
    experts_.assign(here.begin(), here.end());
    find_spare_slots(rank);
    const Change hand = copies_left_ < 1
                            ? Change{}
                            : best_handover({experts_.data(), experts_.size()},
                                            {slots_.data(), slots_.size()}, HeatGap::kColder);
    const Change swap = copies_left_ < 2 ? Change{} : best_trade(rank);
    if (hand.gain <= 0 && swap.gain <= 0) return false;
    if (hand.gain >= swap.gain)
        hand_over(hand.slot, hand.other);
    else
        trade_experts(swap.slot, swap.other);
    return true;
}

// Finds the expert and the slot to give to it with the largest gain.
EvenSplitPlanner::Change EvenSplitPlanner::best_handover(Ids experts, Ids slots, HeatGap gap) {
    Change best{kNoGain, -1, -1};
    for (std::int32_t expert : experts)
        for (std::int32_t slot : slots) {
            const std::int32_t victim = state_.expert_at(slot), rank = state_.rank_of(slot);
            if (victim == expert || !cold_enough(victim, expert, gap) ||
                state_.holds(rank, expert) || !state_.may_change(slot))
                continue;
            const std::int64_t gain = per_cost(gain_of(slot, expert), expert, rank);
            if (gain > best.gain) best = {gain, slot, expert};
        }
    return best;
}

// Returns what the squares fall by if the slot goes to the expert.
std::int64_t EvenSplitPlanner::gain_of(std::int32_t slot, std::int32_t expert) {
    const std::int32_t victim = state_.expert_at(slot);
    const std::int64_t raise = load_per_replica(victim, -1) - load_per_replica(victim, 0);
    const std::int64_t fall = load_per_replica(expert, 0) - load_per_replica(expert, 1);
    for (std::int32_t copy : state_.replicas(victim)) add_change(state_.rank_of(copy), raise);
    for (std::int32_t copy : state_.replicas(expert)) add_change(state_.rank_of(copy), -fall);
    add_change(state_.rank_of(slot), load_per_replica(expert, 1) - load_per_replica(victim, -1));
    std::int64_t gain = 0;
    for (std::int32_t rank : touched_) {
        const std::int64_t before = excess(rank, 0), after = excess(rank, change_[rank]);
        gain += before * before - after * after;
        change_[rank] = 0;
    }
    touched_.clear();
    return gain;
}

void EvenSplitPlanner::add_change(std::int32_t rank, std::int64_t load) {
    // A rank whose changes cancel out is listed twice. The first visit sets its change to 0, so
    // that the second adds nothing.
    if (change_[rank] == 0) touched_.push_back(rank);
    change_[rank] += load;
}

// Finds the slot of this rank and the slot of another that should trade experts.
EvenSplitPlanner::Change EvenSplitPlanner::best_trade(std::int32_t rank) const {
    Change best;
    const std::int32_t first = rank * topology_.shape.per_rank();
    const std::int64_t ours = excess(rank, 0);
    for (std::int32_t slot = 0; slot < topology_.shape.slots; ++slot) {
        const std::int32_t there = state_.rank_of(slot);
        if (there == rank || !state_.may_change(slot)) continue;
        const std::int64_t theirs = excess(there, 0), before = ours * ours + theirs * theirs;
        for (std::int32_t s = first; s < first + topology_.shape.per_rank(); ++s) {
            const std::int64_t lighter = state_.flow(s) - state_.flow(slot);
            if (lighter <= 0 || !state_.may_change(s)) continue;
            const std::int64_t x = excess(rank, -lighter), y = excess(there, lighter);
            const std::int64_t gain = (before - x * x - y * y) / 2;
            if (gain > best.gain && topology_.may_swap(state_, s, slot)) best = {gain, s, slot};
        }
    }
    // The cost of nodes is applied to the best pair only, not to each: it searches replicas.
    if (best.slot < 0 || options_.node_cost == kShareOne) return best;
    const std::int64_t both = copy_cost(state_.expert_at(best.slot), state_.rank_of(best.other)) +
                              copy_cost(state_.expert_at(best.other), rank);
    best.gain = static_cast<std::int64_t>(static_cast<__int128>(best.gain) * 2 * kShareOne / both);
    return best;
}

void EvenSplitPlanner::hand_over(std::int32_t slot, std::int32_t expert) {
    const std::int32_t victim = state_.expert_at(slot);
    state_.replace(slot, expert);
    state_.split_evenly(victim);
    --copies_left_;
}

void EvenSplitPlanner::trade_experts(std::int32_t a, std::int32_t b) {
    state_.swap(a, b);
    copies_left_ -= 2;
}

// Lists the slots that could be handed over, except those of one rank: the coldest replicas first.
void EvenSplitPlanner::find_spare_slots(std::int32_t except) {
    slots_.clear();
    for (std::int32_t e : state_.replicated_experts())
        for (std::int32_t slot : state_.replicas(e))
            if (state_.rank_of(slot) != except && can_spare(slot)) slots_.push_back(slot);
    const std::size_t looked = std::min(kMaxSpareSlots, slots_.size());
    const auto colder = [&](std::int32_t a, std::int32_t b) {
        const std::int64_t x = state_.flow(a), y = state_.flow(b);
        return x != y ? x < y : a < b;
    };
    std::partial_sort(slots_.begin(), slots_.begin() + looked, slots_.end(), colder);
    slots_.resize(looked);
}

// Whether the expert of a slot still meets `survive` without this replica.
bool EvenSplitPlanner::can_spare(std::int32_t slot) const {
    const Ids copies = state_.replicas(state_.expert_at(slot));
    if (static_cast<std::int32_t>(copies.size) <= topology_.replica_range().low) return false;
    return topology_.survive != Survive::kNodeLoss || topology_.on_two_nodes(copies, slot);
}

bool EvenSplitPlanner::cold_enough(std::int32_t victim, std::int32_t expert, HeatGap gap) const {
    if (gap == HeatGap::kAny) return true;
    return load_per_replica(victim, -1) * (gap == HeatGap::kColder ? 1 : 2) <=
           load_per_replica(expert, 0);
}

// Returns the load per replica of an expert if it had `more` replicas more.
std::int64_t EvenSplitPlanner::load_per_replica(std::int32_t expert, std::int32_t more) const {
    const std::int64_t copies = static_cast<std::int64_t>(state_.replicas(expert).size) + more;
    return copies < 2 ? state_.load_of(expert) : state_.load_of(expert) / copies;
}

// Returns what a rank with `more` load has above the mean, shifted so that its square fits.
std::int64_t EvenSplitPlanner::excess(std::int32_t rank, std::int64_t more) const {
    const std::int64_t over = state_.rank_load(rank) + more - state_.load_at(state_.mean(), rank);
    return std::max<std::int64_t>(over, 0) >> shift_;
}

// Divides the gain of a copy by what the copy costs.
std::int64_t EvenSplitPlanner::per_cost(std::int64_t gain, std::int32_t expert,
                                        std::int32_t rank) const {
    if (options_.node_cost == kShareOne) return gain;
    return static_cast<std::int64_t>(static_cast<__int128>(gain) * kShareOne /
                                     copy_cost(expert, rank));
}

// Returns the cost of a copy to a rank: more if no replica of the expert is on its node.
std::int64_t EvenSplitPlanner::copy_cost(std::int32_t expert, std::int32_t rank) const {
    const Ids copies = state_.replicas(expert);
    const bool near = std::any_of(copies.begin(), copies.end(), [&](auto copy) {
        return topology_.node_of(state_.rank_of(copy)) == topology_.node_of(rank);
    });
    return near ? kShareOne : options_.node_cost;
}

}  // namespace equipoise
