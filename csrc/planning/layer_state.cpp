#include "planning/layer_state.h"

#include <algorithm>
#include <numeric>

#include "routing/routing_table.h"

namespace equipoise {

std::int64_t max_layer_tokens(Ids capacity) {
    const std::int32_t least = *std::min_element(capacity.begin(), capacity.end());
    const auto exact = static_cast<__int128>(kMaxTokens) * std::min(least, kShareOne);
    return static_cast<std::int64_t>(exact / kShareOne);
}

LayerState::LayerState(LayerShape shape, Ids capacity)
    : shape_(shape),
      capacity_(capacity),
      total_capacity_(std::accumulate(capacity.begin(), capacity.end(), std::int64_t{0})),
      uniform_(
          std::all_of(capacity.begin(), capacity.end(), [](auto c) { return c == kShareOne; })),
      changes_(shape.ranks),
      rank_of_(shape.slots),
      placement_(shape.slots),
      replica_start_(shape.experts + 1),
      replica_slots_(shape.slots),
      replicated_slots_(shape.slots),
      replicated_count_(shape.ranks),
      load_(shape.experts),
      flow_(shape.slots),
      rank_load_(shape.ranks) {
    for (std::int32_t s = 0; s < shape.slots; ++s) rank_of_[s] = s / shape.per_rank();
}

void LayerState::reset(Counts load, Ids placement) {
    total_ = 0;
    for (std::int32_t e = 0; e < shape_.experts; ++e) {
        load_[e] = load[e] * kShareOne;
        total_ += load_[e];
    }
    mean_ = height_of(total_, total_capacity_);
    set_placement(placement);
}

void LayerState::set_placement(Ids placement) {
    if (placement.data != placement_.data())
        std::copy(placement.begin(), placement.end(), placement_.begin());
    count_changes();
    rebuild_index();
    split_evenly();
}

void LayerState::limit_changes(Ids installed, std::int32_t max_changes) {
    installed_ = installed;
    max_changes_ = max_changes;
    count_changes();
}

void LayerState::count_changes() {
    if (installed_.data == nullptr) return;
    std::fill(changes_.begin(), changes_.end(), 0);
    for (std::int32_t s = 0; s < shape_.slots; ++s)
        changes_[rank_of_[s]] += placement_[s] != installed_[s];
}

// Keeps the count of changes up to date, which may_change reads.
void LayerState::set_expert(std::int32_t slot, std::int32_t expert) {
    if (installed_.data != nullptr)
        changes_[rank_of_[slot]] +=
            (expert != installed_[slot]) - (placement_[slot] != installed_[slot]);
    placement_[slot] = expert;
}

void LayerState::rebuild_index() {
    sort_slots(placement(), {replica_start_.data(), replica_start_.size()},
               {replica_slots_.data(), replica_slots_.size()});
    replicated_experts_.clear();
    for (std::int32_t e = 0; e < shape_.experts; ++e)
        if (replica_start_[e + 1] - replica_start_[e] > 1) replicated_experts_.push_back(e);
    std::fill(replicated_count_.begin(), replicated_count_.end(), 0);
    for (std::int32_t s = 0; s < shape_.slots; ++s) {
        const std::int32_t expert = placement_[s], rank = rank_of_[s];
        if (replica_start_[expert + 1] - replica_start_[expert] > 1)
            replicated_slots_[rank * shape_.per_rank() + replicated_count_[rank]++] = s;
    }
}

// Experts with one replica first, and in one pass: they are most, and need no division.
void LayerState::split_evenly() {
    std::fill(rank_load_.begin(), rank_load_.end(), 0);
    for (std::int32_t e = 0; e < shape_.experts; ++e) {
        const std::int32_t slot = replica_slots_[replica_start_[e]];
        flow_[slot] = load_[e];
        rank_load_[rank_of_[slot]] += load_[e];
    }
    for (std::int32_t e : replicated_experts_) {
        for (std::int32_t slot : replicas(e)) {
            if (slot != replica_slots_[replica_start_[e]]) flow_[slot] = 0;
        }
        split_load(e);
    }
}

// The first slot gets the remainder, so that flows sum to the load exactly.
void LayerState::split_load(std::int32_t expert) {
    const Ids slots = replicas(expert);
    if (slots.size == 1) return set_flow(slots[0], load_[expert]);
    const auto count = static_cast<std::int64_t>(slots.size);
    std::int64_t rest = load_[expert] % count;
    for (std::int32_t slot : slots) {
        set_flow(slot, load_[expert] / count + rest);
        rest = 0;
    }
}

void LayerState::set_flow(std::int32_t slot, std::int64_t flow) {
    rank_load_[rank_of_[slot]] += flow - flow_[slot];
    flow_[slot] = flow;
}

bool LayerState::holds(std::int32_t rank, std::int32_t expert) const {
    const Ids slots = replicas(expert);
    return std::any_of(slots.begin(), slots.end(), [&](auto s) { return rank_of_[s] == rank; });
}

// Both in 128 bits: a load near 2^62 times a capacity near 2^31 does not fit into 64. Both round
// up, so that a rank at the height that was found for a load has room for all of it.
std::int64_t LayerState::scale_to_capacity(std::int64_t height, std::int32_t rank) const {
    const auto exact = static_cast<__int128>(height) * capacity_[rank];
    return static_cast<std::int64_t>(
        std::min<__int128>((exact + kShareOne - 1) / kShareOne, kMaxLoad));
}

std::int64_t LayerState::divide_by_capacity(std::int64_t load, std::int64_t capacity) const {
    const auto exact = static_cast<__int128>(load) * kShareOne;
    return static_cast<std::int64_t>((exact + capacity - 1) / capacity);
}

std::int32_t LayerState::square_shift() const {
    std::int32_t shift = 0;
    while (mean_ >> shift >= std::int64_t{1} << 14) ++shift;
    return shift;
}

void LayerState::sum_single_replicas(std::vector<std::int64_t>& single) const {
    single = rank_load_;
    for (std::int32_t e : replicated_experts_)
        for (std::int32_t slot : replicas(e)) single[rank_of_[slot]] -= flow_[slot];
}

void LayerState::push(std::int32_t from, std::int32_t to, std::int64_t amount) {
    flow_[from] -= amount;
    flow_[to] += amount;
    rank_load_[rank_of_[from]] -= amount;
    rank_load_[rank_of_[to]] += amount;
}

std::int32_t LayerState::least_loaded_replica(std::int32_t expert, std::int32_t except) const {
    std::int32_t best = -1;
    for (std::int32_t s : replicas(expert))
        if (s != except && (best < 0 || rank_load_[rank_of_[s]] < rank_load_[rank_of_[best]]))
            best = s;
    return best;
}

void LayerState::replace(std::int32_t slot, std::int32_t expert) {
    const std::int32_t previous = placement_[slot];
    push(slot, least_loaded_replica(previous, slot), flow_[slot]);
    set_expert(slot, expert);
    move_in_index(slot, previous, expert);
    if (replicas(previous).size == 1) note_single(previous);
    if (replicas(expert).size == 2)
        note_replicated(expert, replicas(expert)[replicas(expert)[0] == slot]);
    split_load(expert);
}

// Moves a slot from the run of one expert to that of the other: a rotation of what lies between,
// whose runs begin one place earlier or later afterwards.
void LayerState::move_in_index(std::int32_t slot, std::int32_t previous, std::int32_t expert) {
    const auto run = [&](std::int32_t e) { return replica_slots_.begin() + replica_start_[e]; };
    const auto at = std::lower_bound(run(previous), run(previous + 1), slot);
    const auto to = std::lower_bound(run(expert), run(expert + 1), slot);
    if (previous < expert) {
        std::rotate(at, at + 1, to);
        for (std::int32_t e = previous + 1; e <= expert; ++e) --replica_start_[e];
    } else {
        std::rotate(to, at, at + 1);
        for (std::int32_t e = expert + 1; e <= previous; ++e) ++replica_start_[e];
    }
}

// The expert has one replica left: its load cannot be moved any more.
void LayerState::note_single(std::int32_t expert) {
    replicated_experts_.erase(
        std::lower_bound(replicated_experts_.begin(), replicated_experts_.end(), expert));
    drop_replicated_slot(replicas(expert)[0]);
}

// Takes the slot out of the sorted list of its rank.
void LayerState::drop_replicated_slot(std::int32_t slot) {
    const std::int32_t rank = rank_of_[slot];
    auto* first = replicated_slots_.data() + rank * shape_.per_rank();
    auto* last = first + replicated_count_[rank]--;
    auto* at = std::lower_bound(first, last, slot);
    std::copy(at + 1, last, at);
}

void LayerState::fix_flow(std::int32_t slot, std::int64_t flow) {
    set_flow(slot, flow);
    drop_replicated_slot(slot);
}

// The expert has a second replica now. `slot` is its first one, whose load can be moved from now
// on. The second slot is in the list already: its previous expert had another replica.
void LayerState::note_replicated(std::int32_t expert, std::int32_t slot) {
    replicated_experts_.insert(
        std::lower_bound(replicated_experts_.begin(), replicated_experts_.end(), expert), expert);
    const std::int32_t rank = rank_of_[slot];
    auto* first = replicated_slots_.data() + rank * shape_.per_rank();
    auto* last = first + replicated_count_[rank]++;
    auto* at = std::lower_bound(first, last, slot);
    std::copy_backward(at, last, last + 1);
    *at = slot;
}

void LayerState::swap(std::int32_t a, std::int32_t b) {
    const std::int64_t first = flow_[a], second = flow_[b];
    const std::int32_t left = placement_[a], right = placement_[b];
    set_expert(a, right);
    set_expert(b, left);
    set_flow(a, second);
    set_flow(b, first);
    // Runs are sorted by slot: with several replicas the slot may have to change its place in the
    // run.
    if (replicas(left).size > 1 || replicas(right).size > 1) return rebuild_index();
    replica_slots_[replica_start_[left]] = b;
    replica_slots_[replica_start_[right]] = a;
}

}  // namespace equipoise
