#include "routing/levelled_route.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "common/hash.h"
#include "routing/route.h"

namespace equipoise {
namespace {

constexpr int kFractionBits = 8;
constexpr int kSweepsAlone = 8;
constexpr int kSweepsOfGroup = 32;

// Two replicas of an expert, neighbours on its ring.
struct Pair {
    std::int32_t first, second;            // entries of `Levelling::loads`
    std::int32_t first_rank, second_rank;
};

// An expert with several replicas. Experts with one are only a constant load on their rank.
struct Plural {
    std::int32_t expert;
    std::int32_t first;  // entry of its first replica in `Levelling::loads`
    std::int32_t copies;
};

// Loads in 1 / 256 row until they are rounded, then in rows. In 64 bits: a batch may have up to
// 2^31 rows.
class Levelling {
 public:
    Levelling(Ids counts, const RoutingTable& table, std::int32_t ranks)
        : counts_(counts), rank_loads_(ranks, 0) {
        const std::int32_t per_rank = table.slots() / ranks;
        const auto extra = static_cast<std::size_t>(table.slots() - table.experts());
        plurals_.reserve(extra);
        loads_.reserve(2 * extra);
        homes_.reserve(2 * extra);
        for (std::int32_t e = 0; e < table.experts(); ++e) {
            const std::int32_t begin = table.start[e], copies = table.start[e + 1] - begin;
            const std::int64_t total = static_cast<std::int64_t>(counts[e]) << kFractionBits;
            if (copies == 1) {
                rank_loads_[table.replicas[begin] / per_rank] += total;
                continue;
            }
            plurals_.push_back({e, static_cast<std::int32_t>(loads_.size()), copies});
            for (std::int32_t i = 0; i < copies; ++i) {
                loads_.push_back(total / copies + (i == 0 ? total % copies : 0));
                homes_.push_back(table.replicas[begin + i] / per_rank);
                rank_loads_[homes_.back()] += loads_.back();
            }
        }
        link_pairs();
    }

    void level(int sweeps) {
        for (int sweep = 0; sweep < sweeps; ++sweep)
            for (const Pair& pair : pairs_) {
                const std::int64_t difference = difference_of(pair);
                // Three quarters: half would level the two ranks, and half as much again converges
                // in about half the sweeps.
                move(pair, difference - (difference >> 2));
            }
    }

    void round(std::uint32_t seed) {
        // Experts with one replica are whole already: what is left is exactly divisible.
        for (std::size_t i = 0; i < loads_.size(); ++i) rank_loads_[homes_[i]] -= loads_[i];
        for (std::int64_t& load : rank_loads_) load >>= kFractionBits;
        for (const Plural& plural : plurals_) {
            const auto expert = static_cast<std::uint32_t>(plural.expert);
            std::int64_t exact = absorb32(seed, expert) >> (32 - kFractionBits), taken = 0;
            for (std::int32_t i = plural.first; i < plural.first + plural.copies; ++i) {
                exact += loads_[i];
                const bool last = i == plural.first + plural.copies - 1;
                const std::int64_t end = last ? counts_[plural.expert] : exact >> kFractionBits;
                loads_[i] = end - taken;
                taken = end;
                rank_loads_[homes_[i]] += loads_[i];
            }
        }
        // Integer division rounds towards zero.
        for (const Pair& pair : pairs_) move(pair, difference_of(pair) / 2);
    }

    const std::vector<Plural>& plurals() const { return plurals_; }
    std::int64_t quota(std::int32_t entry) const { return loads_[entry]; }

 private:
    void link_pairs() {
        pairs_.reserve(loads_.size());
        for (const Plural& plural : plurals_) {
            const std::int32_t last = plural.first + plural.copies - 1;
            for (std::int32_t i = plural.first; i < last; ++i) link(i, i + 1);
            if (plural.copies > 2) link(last, plural.first);
        }
    }

    void link(std::int32_t first, std::int32_t second) {
        pairs_.push_back({first, second, homes_[first], homes_[second]});
    }

    std::int64_t difference_of(const Pair& pair) const {
        return rank_loads_[pair.first_rank] - rank_loads_[pair.second_rank];
    }

    void move(const Pair& pair, std::int64_t load) {
        load = std::max(std::min(load, loads_[pair.first]), -loads_[pair.second]);
        loads_[pair.first] -= load;
        loads_[pair.second] += load;
        rank_loads_[pair.first_rank] -= load;
        rank_loads_[pair.second_rank] += load;
    }

    Ids counts_;
    std::vector<std::int64_t> rank_loads_;
    std::vector<Plural> plurals_;
    std::vector<std::int64_t> loads_;   // of the replicas of plural experts, in the order of runs
    std::vector<std::int32_t> homes_;   // their ranks
    std::vector<Pair> pairs_;
};

// Where the next rows of an expert go.
struct Cursor {
    std::int32_t slot;
    std::int32_t left;     // rows until the next replica's turn
    std::int32_t replica;  // entry of the table
    std::int32_t quota;    // entry of the levelling; that of an expert with one replica is not used
};

constexpr std::int32_t kUnlimited = std::numeric_limits<std::int32_t>::max();

class Cursors {
 public:
    Cursors(const RoutingTable& table, const Levelling& levelling)
        : table_(table), levelling_(levelling), cursors_(table.experts()) {
        for (std::int32_t e = 0; e < table.experts(); ++e)
            cursors_[e] = {table.replicas[table.start[e]], kUnlimited, table.start[e], -1};
        for (const Plural& plural : levelling.plurals()) {
            Cursor& cursor = cursors_[plural.expert];
            cursor.quota = plural.first;
            cursor.left = static_cast<std::int32_t>(levelling.quota(plural.first));
        }
    }

    // Passes over the rows of the ranks before this one.
    void skip(Ids before) {
        for (const Plural& plural : levelling_.plurals()) {
            Cursor& cursor = cursors_[plural.expert];
            std::int32_t rows = before[plural.expert];
            while (rows >= cursor.left && !is_last(plural.expert)) {
                rows -= cursor.left;
                advance(plural.expert);
            }
            // A number of another group than the total may exceed it: the last replica takes all.
            cursor.left = is_last(plural.expert) ? kUnlimited : cursor.left - rows;
        }
    }

    std::int32_t next_slot(std::int32_t expert) {
        Cursor& cursor = cursors_[expert];
        while (cursor.left == 0) advance(expert);
        --cursor.left;
        return cursor.slot;
    }

 private:
    bool is_last(std::int32_t expert) const {
        return cursors_[expert].replica + 1 == table_.start[expert + 1];
    }

    void advance(std::int32_t expert) {
        Cursor& cursor = cursors_[expert];
        cursor.slot = table_.replicas[++cursor.replica];
        const auto quota = static_cast<std::int32_t>(levelling_.quota(++cursor.quota));
        cursor.left = is_last(expert) ? kUnlimited : quota;
    }

    const RoutingTable& table_;
    const Levelling& levelling_;
    std::vector<Cursor> cursors_;
};

}  // namespace

void route_levelled(Ids ids, const RoutingTable& table, std::int32_t ranks, std::uint32_t seed,
                    const GroupCounts& group, Span<std::int32_t> slots, Span<std::int32_t> counts) {
    count_experts(ids, counts);
    const bool grouped = group.total.size > 0;
    Levelling levelling(grouped ? group.total : Ids{counts.data, counts.size}, table, ranks);
    levelling.level(grouped ? kSweepsOfGroup : kSweepsAlone);
    levelling.round(seed);
    Cursors cursors(table, levelling);
    if (grouped) cursors.skip(group.before);
    for (std::size_t j = 0; j < ids.size; ++j)
        slots[j] = is_expert(ids[j], table.experts()) ? cursors.next_slot(ids[j]) : table.slots();
}

void add_levelled_rows(Ids counts, const RoutingTable& table, std::int32_t ranks,
                       std::uint32_t seed, bool group, Span<std::int64_t> rows) {
    Levelling levelling(counts, table, ranks);
    levelling.level(group ? kSweepsOfGroup : kSweepsAlone);
    levelling.round(seed);
    for (std::int32_t e = 0; e < table.experts(); ++e)
        if (table.start[e + 1] - table.start[e] == 1)
            rows[table.replicas[table.start[e]]] += counts[e];
    for (const Plural& plural : levelling.plurals())
        for (std::int32_t i = 0; i < plural.copies; ++i)
            rows[table.replicas[table.start[plural.expert] + i]] +=
                levelling.quota(plural.first + i);
}

void divide_group_rows(Ids counts, const RoutingTable& table, std::int32_t ranks,
                       std::uint32_t seed, Span<std::int64_t> rows) {
    const auto experts = static_cast<std::size_t>(table.experts());
    const auto slots = static_cast<std::size_t>(table.slots());
    const std::size_t members = counts.size / experts;
    std::vector<std::int32_t> total(experts, 0);
    for (std::size_t i = 0; i < members * experts; ++i) total[i % experts] += counts[i];
    Levelling levelling({total.data(), experts}, table, ranks);
    levelling.level(kSweepsOfGroup);
    levelling.round(seed);
    for (std::size_t member = 0; member < members; ++member)
        for (std::size_t e = 0; e < experts; ++e)
            if (table.start[e + 1] - table.start[e] == 1)
                rows[member * slots + table.replicas[table.start[e]]] = counts[member * experts + e];
    for (const Plural& plural : levelling.plurals()) {
        std::int64_t begin = 0;  // of the quota, in rows of the expert over all members
        for (std::int32_t i = 0; i < plural.copies; ++i) {
            const std::int64_t end = begin + levelling.quota(plural.first + i);
            const std::int32_t slot = table.replicas[table.start[plural.expert] + i];
            std::int64_t before = 0;
            for (std::size_t member = 0; member < members; ++member) {
                const std::int64_t until = before + counts[member * experts + plural.expert];
                const std::int64_t common = std::min(until, end) - std::max(before, begin);
                rows[member * slots + slot] = std::max<std::int64_t>(common, 0);
                before = until;
            }
            begin = end;
        }
    }
}

}  // namespace equipoise
