#include "level.h"

#include <algorithm>

namespace equipoise {
namespace {

// So few ranks are emptied one by one.
constexpr std::size_t kFew = 2;

}  // namespace

Leveller::Leveller(Board& board)
    : board_(board),
      seen_(board.shape().ranks),
      from_(board.shape().ranks) {
    order_.reserve(board.shape().ranks);
    queue_.reserve(board.shape().ranks);
}

std::int64_t Leveller::level(std::int64_t height) {
    binding_.clear();
    if (overfull(height) > kFew) {
        drain(height);
        overfull(height);
    }
    for (std::int32_t rank : order_)
        while (board_.full(rank) > board_.share(height, rank)) {
            const Ids stuck = pour_from(rank, height);
            std::int64_t load = 0, capacity = 0;
            for (std::int32_t r : stuck) {
                load += board_.full(r);
                capacity += board_.capacity(r);
            }
            if (stuck.size == 0) continue;
            height = board_.height(load, capacity);
            binding_.assign(stuck.begin(), stuck.end());
        }
    return height;
}

// Puts the ranks that are fuller than that in order; how many there are.
std::size_t Leveller::overfull(std::int64_t height) {
    order_.clear();
    for (std::int32_t rank = 0; rank < board_.shape().ranks; ++rank)
        if (board_.full(rank) > board_.share(height, rank)) order_.push_back(rank);
    // The fullest first: what they cannot get rid of spares the others a search.
    std::sort(order_.begin(), order_.end(), [&](auto a, auto b) {
        return board_.full(a) != board_.full(b) ? board_.full(a) > board_.full(b) : a < b;
    });
    return order_.size();
}

// The last found first: what a rank has too much or too little of goes to the one that it was found
// from.
void Leveller::drain(std::int64_t height) {
    begin_round();
    queue_.clear();
    for (std::int32_t rank = 0; rank < board_.shape().ranks; ++rank)
        if (seen_[rank] != round_) grow(rank);
    for (std::size_t at = queue_.size(); at-- > 0;) {
        const std::int32_t rank = queue_[at], there = from_[rank];
        if (there < 0) continue;
        const std::int32_t here = copy_on(board_.expert_at(there), rank);
        const std::int64_t over = board_.full(rank) - board_.share(height, rank);
        if (over > 0)
            board_.pour(here, there, std::min(over, board_.flow(here)));
        else
            board_.pour(there, here, std::min(-over, board_.flow(there)));
    }
}

// Queues a component, breadth first.
void Leveller::grow(std::int32_t root) {
    std::size_t head = queue_.size();
    queue_.push_back(root);
    seen_[root] = round_;
    from_[root] = -1;
    for (; head < queue_.size(); ++head)
        for (std::int32_t slot : board_.joints(queue_[head]))
            for (std::int32_t copy : board_.copies(board_.expert_at(slot))) {
                const std::int32_t rank = board_.rank_of(copy);
                if (seen_[rank] == round_) continue;
                seen_[rank] = round_;
                from_[rank] = slot;
                queue_.push_back(rank);
            }
}

Ids Leveller::pour_from(std::int32_t rank, std::int64_t height) {
    if (!search(rank, height)) return {queue_.data(), queue_.size()};
    pour_along(rank, height);
    return {nullptr, 0};
}

// Nobody has been seen.
void Leveller::begin_round() {
    if (++round_ < INT32_MAX) return;
    std::fill(seen_.begin(), seen_.end(), 0);
    round_ = 1;
}

// Breadth first; whether a rank with room was found, the last of the queue.
bool Leveller::search(std::int32_t rank, std::int64_t height) {
    begin_round();
    queue_.assign(1, rank);
    seen_[rank] = round_;
    for (std::size_t head = 0; head < queue_.size(); ++head)
        for (std::int32_t slot : board_.joints(queue_[head]))
            if (board_.flow(slot) > 0 && visit(slot, height)) return true;
    return false;
}

// Queues the other ranks that hold this slot's expert; whether one of them has room.
bool Leveller::visit(std::int32_t slot, std::int64_t height) {
    for (std::int32_t copy : board_.copies(board_.expert_at(slot))) {
        const std::int32_t rank = board_.rank_of(copy);
        if (seen_[rank] == round_) continue;
        seen_[rank] = round_;
        from_[rank] = slot;
        queue_.push_back(rank);
        if (board_.full(rank) < board_.share(height, rank)) return true;
    }
    return false;
}

void Leveller::pour_along(std::int32_t rank, std::int64_t height) {
    const std::int32_t end = queue_.back();
    std::int64_t amount = std::min(board_.full(rank) - board_.share(height, rank),
                                   board_.share(height, end) - board_.full(end));
    for (std::int32_t r = end; r != rank; r = board_.rank_of(from_[r]))
        amount = std::min(amount, board_.flow(from_[r]));
    for (std::int32_t r = end; r != rank; r = board_.rank_of(from_[r]))
        board_.pour(from_[r], copy_on(board_.expert_at(from_[r]), r), amount);
}

std::int32_t Leveller::copy_on(std::int32_t expert, std::int32_t rank) const {
    const Ids copies = board_.copies(expert);
    return *std::find_if(copies.begin(), copies.end(),
                         [&](auto slot) { return board_.rank_of(slot) == rank; });
}

}  // namespace equipoise
