#include "planning/max_flow_levelling.h"

#include <algorithm>

namespace equipoise {
namespace {

// Up to so many overfull ranks the tree is skipped: a search from each costs less.
constexpr std::size_t kFewRanks = 2;

}  // namespace

MaxFlowLeveller::MaxFlowLeveller(LayerState& state)
    : state_(state), visited_(state.shape().ranks), found_by_(state.shape().ranks) {
    overfull_.reserve(state.shape().ranks);
    queue_.reserve(state.shape().ranks);
}

std::int64_t MaxFlowLeveller::level(std::int64_t height, std::int64_t enough) {
    binding_.clear();
    if (find_overfull(height) > kFewRanks) {
        level_along_tree(height);
        find_overfull(height);
    }
    sort_overfull();
    for (std::int32_t rank : overfull_)
        while (state_.rank_load(rank) > state_.load_at(height, rank)) {
            const Ids closed = push_excess(rank, height);
            if (closed.size == 0) continue;  // a path was used up: search again
            std::int64_t load = 0, capacity = 0;
            for (std::int32_t r : closed) {
                load += state_.rank_load(r);
                capacity += state_.capacity(r);
            }
            // Ranks that were emptied before stay below: heights only rise.
            height = state_.height_of(load, capacity);
            binding_.assign(closed.begin(), closed.end());
            if (height > enough) return height;
        }
    return height;
}

// Lists the ranks above the height, and returns how many there are.
std::size_t MaxFlowLeveller::find_overfull(std::int64_t height) {
    overfull_.clear();
    for (std::int32_t rank = 0; rank < state_.shape().ranks; ++rank)
        if (state_.rank_load(rank) > state_.load_at(height, rank)) overfull_.push_back(rank);
    return overfull_.size();
}

// The fullest first: they raise the height most if they cannot be emptied, and that spares the
// others a search.
void MaxFlowLeveller::sort_overfull() {
    std::sort(overfull_.begin(), overfull_.end(), [&](auto a, auto b) {
        return state_.rank_load(a) != state_.rank_load(b)
                   ? state_.rank_load(a) > state_.rank_load(b)
                   : a < b;
    });
}

// Visits ranks in the reverse order of their discovery, so that all children come before a parent,
// and passes what each has too much or too little to its parent.
void MaxFlowLeveller::level_along_tree(std::int64_t height) {
    begin_search();
    queue_.clear();
    const auto ranks = static_cast<std::size_t>(state_.shape().ranks);
    for (std::int32_t rank = 0; queue_.size() < ranks; ++rank)
        if (visited_[rank] != search_) grow_tree(rank);
    for (std::size_t at = queue_.size(); at-- > 0;) {
        const std::int32_t rank = queue_[at];
        const auto [from_slot, to_slot] = found_by_[rank];
        if (from_slot < 0) continue;
        const std::int64_t excess = state_.rank_load(rank) - state_.load_at(height, rank);
        if (excess > 0)
            state_.push(to_slot, from_slot, std::min(excess, state_.flow(to_slot)));
        else
            state_.push(from_slot, to_slot, std::min(-excess, state_.flow(from_slot)));
    }
}

// Adds the component of a rank to the queue, breadth first: short ways keep flows from running out.
void MaxFlowLeveller::grow_tree(std::int32_t root) {
    const auto ranks = static_cast<std::size_t>(state_.shape().ranks);
    std::size_t head = queue_.size();
    mark_found(root, {-1, -1});
    for (; head < queue_.size() && queue_.size() < ranks; ++head)
        for (std::int32_t slot : state_.replicated_slots(queue_[head]))
            for (std::int32_t copy : state_.replicas(state_.expert_at(slot))) {
                const std::int32_t rank = state_.rank_of(copy);
                if (visited_[rank] != search_) mark_found(rank, {slot, copy});
            }
}

// Forgets which ranks were visited. Clears the list only when the counter is used up.
void MaxFlowLeveller::begin_search() {
    if (++search_ < INT32_MAX) return;
    std::fill(visited_.begin(), visited_.end(), 0);
    search_ = 1;
}

void MaxFlowLeveller::mark_found(std::int32_t rank, Edge edge) {
    visited_[rank] = search_;
    found_by_[rank] = edge;
    queue_.push_back(rank);
}

// Searches breadth first from a rank above the height, and pushes load to every rank with room. One
// search serves for many paths: it ends, with an empty result, once the rank is emptied or a flow
// on the way ran out, since paths behind that slot are gone. Otherwise returns all ranks that could
// be reached, which have no room.
Ids MaxFlowLeveller::push_excess(std::int32_t rank, std::int64_t height) {
    begin_search();
    queue_.clear();
    mark_found(rank, {-1, -1});
    for (std::size_t head = 0; head < queue_.size(); ++head)
        for (std::int32_t slot : state_.replicated_slots(queue_[head]))
            if (state_.flow(slot) > 0 && !expand_slot(slot, rank, height)) return {nullptr, 0};
    return {queue_.data(), queue_.size()};
}

// Visits the other ranks that hold the expert of a slot, and pushes load to those with room.
// Returns whether the search goes on.
bool MaxFlowLeveller::expand_slot(std::int32_t slot, std::int32_t rank, std::int64_t height) {
    for (std::int32_t copy : state_.replicas(state_.expert_at(slot))) {
        const std::int32_t end = state_.rank_of(copy);
        if (visited_[end] == search_) continue;
        mark_found(end, {slot, copy});
        if (state_.rank_load(end) >= state_.load_at(height, end)) continue;
        if (!push_along_path(rank, end, height)) return false;
    }
    return true;
}

// Pushes as much as the rank has too much, the end has room for and every slot on the path has.
// Returns whether the rank is still above the height and no flow ran out.
bool MaxFlowLeveller::push_along_path(std::int32_t rank, std::int32_t end, std::int64_t height) {
    const std::int64_t excess = state_.rank_load(rank) - state_.load_at(height, rank);
    std::int64_t path_flow = INT64_MAX;
    for (std::int32_t r = end; r != rank; r = state_.rank_of(found_by_[r].from_slot))
        path_flow = std::min(path_flow, state_.flow(found_by_[r].from_slot));
    const std::int64_t room = state_.load_at(height, end) - state_.rank_load(end);
    const std::int64_t amount = std::min({excess, room, path_flow});
    for (std::int32_t r = end; r != rank; r = state_.rank_of(found_by_[r].from_slot))
        state_.push(found_by_[r].from_slot, found_by_[r].to_slot, amount);
    return amount < excess && amount < path_flow;
}

}  // namespace equipoise
