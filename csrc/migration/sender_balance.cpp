#include "migration/sender_balance.h"

#include <algorithm>

namespace equipoise {
namespace {

constexpr std::int32_t kUnseen = -1;
constexpr std::int32_t kNobody = -1;

}  // namespace

Relief::Relief(const Holders& holders, Span<Move> moves, Sent& total, std::int32_t ceiling)
    : holders_(holders),
      moves_(moves),
      total_(total),
      ceiling_(ceiling),
      sends_(total.size()),
      step_(total.size()) {
    for (std::size_t i = 0; i < moves.size; ++i)
        if (moves[i].round != kLocal)
            sends_[holders.cargo().rank_of(moves[i].source)].push_back(
                static_cast<std::int32_t>(i));
}

void Relief::lower_to(std::int32_t floor) {
    const auto shorter = [](const auto& a, const auto& b) { return a.size() < b.size(); };
    while (true) {
        const auto most = std::max_element(sends_.begin(), sends_.end(), shorter);
        if (static_cast<std::int32_t>(most->size()) <= floor) return;
        if (!relieve(static_cast<std::int32_t>(most - sends_.begin()))) return;
    }
}

bool Relief::relieve(std::int32_t busiest) {
    std::int32_t rank = search(busiest);
    if (rank == kNobody) return false;
    ++total_[rank];
    --total_[busiest];
    while (rank != busiest) {
        const Step step = step_[rank];
        rank = holders_.cargo().rank_of(moves_[step.move].source);
        hand_over(step);
    }
    return true;
}

// Breadth first, from the busiest rank to the ranks that could send one of its moves, and so on.
std::int32_t Relief::search(std::int32_t busiest) {
    std::fill(step_.begin(), step_.end(), Step{kUnseen, kUnseen});
    step_[busiest].source = 0;
    queue_.assign(1, busiest);
    for (std::size_t i = 0; i < queue_.size(); ++i)
        for (std::int32_t move : sends_[queue_[i]])
            for (std::int32_t source : holders_.choices(moves_[move])) {
                const std::int32_t rank = holders_.cargo().rank_of(source);
                if (step_[rank].source != kUnseen) continue;
                step_[rank] = {move, source};
                if (has_room(rank, busiest)) return rank;
                queue_.push_back(rank);
            }
    return kNobody;
}

bool Relief::has_room(std::int32_t rank, std::int32_t busiest) const {
    return sends_[rank].size() + 1 < sends_[busiest].size() && total_[rank] < ceiling_;
}

void Relief::hand_over(const Step& step) {
    const Cargo& cargo = holders_.cargo();
    auto& from = sends_[cargo.rank_of(moves_[step.move].source)];
    from.erase(std::find(from.begin(), from.end(), step.move));
    moves_[step.move].source = step.source;
    sends_[cargo.rank_of(step.source)].push_back(step.move);
}

}  // namespace equipoise
