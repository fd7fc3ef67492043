// Lowers the most that one rank has to send.
#pragma once

#include <vector>

#include "migration/installed_slots.h"

namespace equipoise {

using SendCounts = std::vector<std::int32_t>;  // copies by the rank that sends them

// The best assignment of moves to senders, by chains: the busiest sender hands a move to another
// holder, who hands one on, until somebody has room. When the busiest has no such chain, no
// assignment has a lower maximum. Source: the cost-reducing paths of Harvey, Ladner, Lovasz and
// Tamir, "Semi-matchings for bipartite graphs and load balancing" (2003).
class SenderBalance {
 public:
    // `moves` are those of the part that is to be evened out; `total` counts all, and is kept up to
    // date. Nobody's total is raised above `ceiling`.
    SenderBalance(const InstalledSlots& installed, Span<SlotMove> moves, SendCounts& total,
                  std::int32_t ceiling);

    // Until no rank sends more than `floor` in this part, or it cannot be lowered.
    void lower_to(std::int32_t floor);

 private:
    // How the search came to a rank: by a move that may be read from this slot of it.
    struct Step {
        std::int32_t move, source;
    };

    bool relieve(std::int32_t busiest);
    std::int32_t search(std::int32_t busiest);
    bool has_room(std::int32_t rank, std::int32_t busiest) const;
    void reassign(const Step& step);

    const InstalledSlots& installed_;
    Span<SlotMove> moves_;
    SendCounts& total_sends_;
    std::int32_t ceiling_;
    std::vector<std::vector<std::int32_t>> sends_;  // moves of the part, by sender
    std::vector<Step> step_;                        // by rank
    std::vector<std::int32_t> queue_;
};

}  // namespace equipoise
