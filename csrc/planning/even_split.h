// From what is installed to level ranks with few moves, where every expert is split evenly.
#pragma once

#include <vector>

#include "planning/connected.h"
#include "planning/options.h"

namespace equipoise {

// For engines that know no shares. `run` changes the board's placement by at most `copies` copies,
// one change at a time:
// - A slot whose expert is on its rank twice goes over to another expert.
// - As long as a copy takes more than half of what a rank should take, which no packing can hide,
//   its expert gets a slot of one whose copies, one fewer, take less than half of that.
// - For the fullest rank: a slot elsewhere goes over to one of its experts, from one that will not
//   be the hotter of the two by it: one copy, which relieves all ranks that hold the expert. Or two
//   slots trade experts, one of them on this rank: two copies. It is the one that lowers the sum of
//   squares of what ranks have above the mean most, for each copy; copies from another node count
//   for more, where they cost more.
// It ends at the target, where nothing lowers that sum, without copies left, or after as many
// changes as there are slots; with the lowest peak that it came by. Between what is level and what
// is not, the sum knows more than the peak: it sees every rank above the mean, not only the
// fullest.
class Evener {
 public:
    Evener(Board& board, const Rules& rules, const Aims& aims);

    // How many copies are left of those.
    std::int64_t run(std::int64_t copies);

    // Of the fullest rank, relative to its capacity.
    std::int64_t peak() const;
    // Whether a rank has two copies of an expert.
    bool doubled() const;

 private:
    // What is gained, in squares for each copy; the slots that change, or a slot and an expert.
    struct Change {
        std::int64_t gain = 0;
        std::int32_t slot = -1, other = -1;
    };
    // How much hotter than what gives up a slot its new expert is.
    enum class Colder { kAny, kColder, kMuchColder };

    std::int32_t fullest() const;
    void part_doubles();
    bool split();
    bool relieve();
    Change handover(Ids experts, Ids slots, Colder colder);
    Change trade(std::int32_t rank) const;
    std::int64_t gain_of(std::int32_t slot, std::int32_t expert);
    void add(std::int32_t rank, std::int64_t load);
    void give(std::int32_t slot, std::int32_t expert);
    void exchange(std::int32_t a, std::int32_t b);
    void find_spare(std::int32_t but);
    bool spare(std::int32_t slot) const;
    bool colder(std::int32_t victim, std::int32_t expert, Colder how) const;
    std::int64_t part(std::int32_t expert, std::int32_t more) const;
    std::int64_t excess(std::int32_t rank, std::int64_t more) const;
    std::int64_t for_each(std::int64_t gain, std::int32_t expert, std::int32_t rank) const;
    std::int64_t cost(std::int32_t expert, std::int32_t rank) const;

    Board& board_;
    const Rules& rules_;
    const Aims& aims_;
    std::int64_t left_ = 0;
    std::int32_t grain_ = 0;
    std::vector<std::int32_t> kept_, slots_, experts_, touched_;
    std::vector<std::int64_t> change_;  // by rank: what it would have more, 0 where untouched
};

}  // namespace equipoise
