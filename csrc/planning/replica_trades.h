// Copies that change hands between experts.
#pragma once

#include <utility>
#include <vector>

#include "planning/connected.h"
#include "planning/union_find.h"

namespace equipoise {

// Finds what to give up for whom. Needs to be told of every change of the board.
class Market {
 public:
    Market(const Board& board, const Rules& rules, std::int32_t node_cost);

    // The board is another.
    void reset();
    // The copies of this expert changed.
    void note(std::int32_t expert);

    // The expert with the most load per copy that may have more of them; -1 if there is none.
    std::int32_t hottest() const;
    std::int64_t heat(std::int32_t expert) const { return heat_[expert]; }

    // The slot to give to the expert: another expert's copy that is missed at `most` at most, by
    // load per copy of what remains; on a rank for which `open` is not 0. -1 if there is none.
    std::int32_t give_up_for(std::int32_t expert, std::int64_t most,
                             const std::vector<std::int8_t>& open);

 private:
    void offer(std::int32_t victim, std::int32_t expert, const std::vector<std::int8_t>& open);
    bool needed(std::int32_t victim, std::int32_t slot) const;
    std::int64_t cost(std::int32_t expert, std::int32_t rank) const;
    std::int32_t components(std::int32_t slot, std::int32_t expert);

    const Board& board_;
    const Rules& rules_;
    std::int32_t node_cost_;
    std::vector<std::int64_t> heat_, price_;
    std::vector<std::pair<std::int64_t, std::int32_t>> offers_;
    Components joined_;
};

}  // namespace equipoise
