#include "planning/max_flow_levelling.h"

#include <algorithm>

namespace equipoise {
namespace {

// So few ranks are emptied one by one.
constexpr std::size_t kFew = 2;

}  // namespace

Leveller::Leveller(Board& board)
    : board_(board),
      seen_(board.shape().ranks),
      found_by_(board.shape().ranks) {
    order_.reserve(board.shape().ranks);
    queue_.reserve(board.shape().ranks);
}

std::int64_t Leveller::level(std::int64_t height, std::int64_t enough) {
    binding_.clear();
    if (overfull(height) > kFew) {
        drain(height);
        overfull(height);
    }
    sort_overfull();
    for (std::int32_t rank : order_)
        while (board_.full(rank) > board_.share(height, rank)) {
            const Ids stuck = relieve(rank, height);
            if (stuck.size == 0) continue;
            std::int64_t load = 0, capacity = 0;
            for (std::int32_t r : stuck) {
                load += board_.full(r);
                capacity += board_.capacity(r);
            }
            height = board_.height(load, capacity);
            binding_.assign(stuck.begin(), stuck.end());
            if (height > enough) return height;
        }
    return height;
}

// Notes the ranks that are fuller than that; how many there are.
std::size_t Leveller::overfull(std::int64_t height) {
    order_.clear();
    for (std::int32_t rank = 0; rank < board_.shape().ranks; ++rank)
        if (board_.full(rank) > board_.share(height, rank)) order_.push_back(rank);
    return order_.size();
}

// The fullest first: what they cannot get rid of spares the others a search.
void Leveller::sort_overfull() {
    std::sort(order_.begin(), order_.end(), [&](auto a, auto b) {
        return board_.full(a) != board_.full(b) ? board_.full(a) > board_.full(b) : a < b;
    });
}

// The last found first: what a rank has too much or too little of goes to the one that it was found
// from.
void Leveller::drain(std::int64_t height) {
    begin_round();
    queue_.clear();
    const auto ranks = static_cast<std::size_t>(board_.shape().ranks);
    for (std::int32_t rank = 0; queue_.size() < ranks; ++rank)
        if (seen_[rank] != round_) grow(rank);
    for (std::size_t at = queue_.size(); at-- > 0;) {
        const std::int32_t rank = queue_[at];
        const auto [there, here] = found_by_[rank];
        if (there < 0) continue;
        const std::int64_t over = board_.full(rank) - board_.share(height, rank);
        if (over > 0)
            board_.pour(here, there, std::min(over, board_.flow(here)));
        else
            board_.pour(there, here, std::min(-over, board_.flow(there)));
    }
}

// Queues a component, breadth first.
void Leveller::grow(std::int32_t root) {
    const auto ranks = static_cast<std::size_t>(board_.shape().ranks);
    std::size_t head = queue_.size();
    find(root, {-1, -1});
    for (; head < queue_.size() && queue_.size() < ranks; ++head)
        for (std::int32_t slot : board_.joints(queue_[head]))
            for (std::int32_t copy : board_.copies(board_.expert_at(slot))) {
                const std::int32_t rank = board_.rank_of(copy);
                if (seen_[rank] != round_) find(rank, {slot, copy});
            }
}

// Nobody has been seen.
void Leveller::begin_round() {
    if (++round_ < INT32_MAX) return;
    std::fill(seen_.begin(), seen_.end(), 0);
    round_ = 1;
}

void Leveller::find(std::int32_t rank, Joint joint) {
    seen_[rank] = round_;
    found_by_[rank] = joint;
    queue_.push_back(rank);
}

// Breadth first, pouring to every rank with room, until the rank is full no more or a chain ran
// dry: empty then. Otherwise the ranks that its load could be poured to, itself first: all of them
// are at least as full as `height`.
Ids Leveller::relieve(std::int32_t rank, std::int64_t height) {
    begin_round();
    queue_.clear();
    find(rank, {-1, -1});
    for (std::size_t head = 0; head < queue_.size(); ++head)
        for (std::int32_t slot : board_.joints(queue_[head]))
            if (board_.flow(slot) > 0 && !visit(slot, rank, height)) return {nullptr, 0};
    return {queue_.data(), queue_.size()};
}

// Queues the other ranks that hold this slot's expert, and pours to those that have room; whether
// the search goes on.
bool Leveller::visit(std::int32_t slot, std::int32_t rank, std::int64_t height) {
    for (std::int32_t copy : board_.copies(board_.expert_at(slot))) {
        const std::int32_t end = board_.rank_of(copy);
        if (seen_[end] == round_) continue;
        find(end, {slot, copy});
        if (board_.full(end) >= board_.share(height, end)) continue;
        if (!pour_along(rank, end, height)) return false;
    }
    return true;
}

// Whether the rank is still too full, and the chain has not run dry.
bool Leveller::pour_along(std::int32_t rank, std::int32_t end, std::int64_t height) {
    const std::int64_t over = board_.full(rank) - board_.share(height, rank);
    std::int64_t chain = INT64_MAX;
    for (std::int32_t r = end; r != rank; r = board_.rank_of(found_by_[r].there))
        chain = std::min(chain, board_.flow(found_by_[r].there));
    const std::int64_t room = board_.share(height, end) - board_.full(end);
    const std::int64_t amount = std::min({over, room, chain});
    for (std::int32_t r = end; r != rank; r = board_.rank_of(found_by_[r].there))
        board_.pour(found_by_[r].there, found_by_[r].here, amount);
    return amount < over && amount < chain;
}

}  // namespace equipoise
