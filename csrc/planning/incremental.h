// A plan that starts from what is installed.
#pragma once

#include "planning/connected.h"
#include "planning/expert_swaps.h"
#include "planning/max_flow_levelling.h"
#include "planning/options.h"
#include "planning/replica_trades.h"

namespace equipoise {

// `run` changes the board's placement by at most `copies` copies, where the target is missed. In
// this order:
// - Copies change hands: from the expert that misses one least to the hottest one, as long as that
//   is hotter, by the hysteresis. Among the copies to give up, one that leaves the ranks
//   connected, on a rank that is little filled.
// - While a rank cannot be levelled to the target, or, for one step, its single copies leave no
//   slack: the ranks that its load can reach get a joint to the others, one copy; or two experts
//   with one copy trade places, two copies; whichever lowers the peak more for each copy.
// What it ends with is the best that it came by, what is installed included.
// The flows that the board is left with are level.
class Improver {
 public:
    Improver(Board& board, const Rules& rules, const Aims& aims);

    // How many copies are left of those.
    std::int64_t run(std::int64_t copies);

 private:
    bool trade();
    bool take(std::int32_t slot, std::int32_t expert);
    void change();
    void relieve();
    void keep(std::int64_t missed_by);
    std::int64_t measure();
    std::int64_t bound();
    std::int64_t lower();
    bool step();
    bool swap(std::int64_t more_than);
    std::int64_t lowered(std::int32_t expert) const;
    std::int64_t copies(std::int32_t expert) const;
    void close();
    std::int32_t hottest_inside() const;

    Board& board_;
    const Rules& rules_;
    const Aims& aims_;
    Leveller leveller_;
    Market market_;
    Swaps swaps_;
    std::int64_t left_ = 0, mean_ = 0, excess_ = 0, missed_by_ = 0, best_ = 0;
    std::int32_t rank_ = 0, target_ = 0;
    bool stuck_ = false, traded_ = false;
    std::vector<std::int64_t> single_;
    std::vector<std::int8_t> open_;
    std::vector<std::int32_t> inside_, binding_, kept_;
};

}  // namespace equipoise
