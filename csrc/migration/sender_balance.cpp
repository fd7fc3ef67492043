#include "migration/sender_balance.h"

#include <algorithm>

namespace equipoise {
namespace {

constexpr std::int32_t kUnseen = -1;
constexpr std::int32_t kNone = -1;

}  // namespace

SenderBalance::SenderBalance(const InstalledSlots& installed, Span<SlotMove> moves,
                             SendCounts& total, std::int32_t ceiling)
    : installed_(installed),
      moves_(moves),
      total_sends_(total),
      ceiling_(ceiling),
      sends_(total.size()),
      step_(total.size()) {
    for (std::size_t i = 0; i < moves.size; ++i)
        if (moves[i].round != kLocal)
            sends_[installed.spec().rank_of(moves[i].source)].push_back(
                static_cast<std::int32_t>(i));
}

void SenderBalance::lower_to(std::int32_t floor) {
    const auto shorter = [](const auto& a, const auto& b) { return a.size() < b.size(); };
    while (true) {
        const auto most = std::max_element(sends_.begin(), sends_.end(), shorter);
        if (static_cast<std::int32_t>(most->size()) <= floor) return;
        if (!relieve(static_cast<std::int32_t>(most - sends_.begin()))) return;
    }
}

bool SenderBalance::relieve(std::int32_t busiest) {
    std::int32_t rank = search(busiest);
    if (rank == kNone) return false;
    // Ranks in between give one and get one: only the two ends change.
    ++total_sends_[rank];
    --total_sends_[busiest];
    while (rank != busiest) {
        const Step step = step_[rank];
        rank = installed_.spec().rank_of(moves_[step.move].source);
        reassign(step);
    }
    return true;
}

// Breadth first, so that few moves are handed on: from the busiest rank to the ranks that could
// send one of its moves, and so on.
std::int32_t SenderBalance::search(std::int32_t busiest) {
    std::fill(step_.begin(), step_.end(), Step{kUnseen, kUnseen});
    step_[busiest].source = 0;
    queue_.assign(1, busiest);
    for (std::size_t i = 0; i < queue_.size(); ++i)
        for (std::int32_t move : sends_[queue_[i]])
            for (std::int32_t source : installed_.sources_for(moves_[move])) {
                const std::int32_t rank = installed_.spec().rank_of(source);
                if (step_[rank].source != kUnseen) continue;
                step_[rank] = {move, source};
                if (has_room(rank, busiest)) return rank;
                queue_.push_back(rank);
            }
    return kNone;
}

// One more than it has must stay below the busiest, or the maximum would only change places.
bool SenderBalance::has_room(std::int32_t rank, std::int32_t busiest) const {
    return sends_[rank].size() + 1 < sends_[busiest].size() && total_sends_[rank] < ceiling_;
}

void SenderBalance::reassign(const Step& step) {
    const MigrationSpec& spec = installed_.spec();
    auto& from = sends_[spec.rank_of(moves_[step.move].source)];
    from.erase(std::find(from.begin(), from.end(), step.move));
    moves_[step.move].source = step.source;
    sends_[spec.rank_of(step.source)].push_back(step.move);
}

}  // namespace equipoise
