// Lowers the number of moves that the busiest rank sends.
#pragma once

#include <vector>

#include "migration/installed_slots.h"

namespace equipoise {

using SendCounts = std::vector<std::int32_t>;  // by rank: moves that it sends

// Finds the assignment of moves to senders with the lowest maximum. The busiest sender hands a move
// to another rank that holds the expert, that rank hands one on, and so on until a rank has room.
// If the busiest sender has no such path, no assignment has a lower maximum. Source: the
// cost-reducing paths of Harvey, Ladner, Lovasz and Tamir, "Semi-matchings for bipartite graphs and
// load balancing" (2003).
class SenderBalance {
 public:
    // `moves` are the part that is balanced, all moves or those of a chunk. `total` counts the
    // sends of all moves and is kept up to date; no rank's total is raised above `ceiling`.
    SenderBalance(const InstalledSlots& installed, Span<SlotMove> moves, SendCounts& total,
                  std::int32_t ceiling);

    // Stops once no rank sends more than `floor` of these moves, or the maximum cannot be lowered.
    void lower_to(std::int32_t floor);

 private:
    // How the search came to a rank: this move could be read from this slot of it.
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
    std::vector<std::vector<std::int32_t>> sends_;  // by rank: the moves that it sends
    std::vector<Step> step_;                        // by rank
    std::vector<std::int32_t> queue_;
};

}  // namespace equipoise
