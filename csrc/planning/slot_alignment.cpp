#include "planning/slot_alignment.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace equipoise {
namespace {

using RankExperts = std::vector<std::int32_t>;  // the experts of one rank, ascending
using Labels = std::vector<std::int64_t>;

std::vector<RankExperts> sorted_ranks(Ids placement, std::int64_t ranks) {
    const std::size_t per_rank = placement.size / ranks;
    std::vector<RankExperts> sorted;
    sorted.reserve(ranks);
    for (std::int64_t r = 0; r < ranks; ++r) {
        const std::int32_t* first = placement.data + r * per_rank;
        sorted.emplace_back(first, first + per_rank);
        std::sort(sorted.back().begin(), sorted.back().end());
    }
    return sorted;
}

std::int64_t count_common(const RankExperts& a, const RankExperts& b) {
    std::int64_t common = 0;
    for (auto x = a.begin(), y = b.begin(); x != a.end() && y != b.end();) {
        if (*x == *y) ++common;
        const bool step_x = *x <= *y, step_y = *y <= *x;
        x += step_x;
        y += step_y;
    }
    return common;
}

struct RankPair {
    std::int32_t proposed, installed;
};

// Pairs of ranks, grouped by how many experts they have in common: a bucket sort, because the
// counts are small and hundreds of ranks have tens of thousands of pairs.
class Overlaps {
 public:
    Overlaps(const std::vector<RankExperts>& proposed, const std::vector<RankExperts>& installed)
        : by_common_(proposed[0].size() + 1) {
        index(installed);
        std::vector<std::int32_t> common(installed.size()), met;
        for (std::size_t p = 0; p < proposed.size(); ++p) {
            count(proposed[p], common, met);
            std::sort(met.begin(), met.end());
            for (std::int32_t q : met)
                by_common_[std::exchange(common[q], 0)].push_back(
                    {static_cast<std::int32_t>(p), q});
            met.clear();
        }
    }

    // Visits pairs with most in common first, then by lower proposed and lower installed rank.
    // Pairs with nothing in common are left out: on hundreds of ranks they are nearly all.
    template <typename Visit>
    void each(Visit visit) const {
        for (std::size_t common = by_common_.size(); common-- > 1;)
            for (const RankPair& pair : by_common_[common])
                visit(pair, static_cast<std::int64_t>(common));
    }

 private:
    struct Holder {
        std::int32_t expert, rank, copies;

        bool operator<(const Holder& other) const { return expert < other.expert; }
    };

    // Lists the installed ranks of each expert.
    void index(const std::vector<RankExperts>& installed) {
        for (std::size_t q = 0; q < installed.size(); ++q)
            each_run(installed[q], [&](std::int32_t expert, std::int32_t copies) {
                holders_.push_back({expert, static_cast<std::int32_t>(q), copies});
            });
        std::sort(holders_.begin(), holders_.end());
    }

    // Counts what a proposed rank has in common with each installed one; `met` lists those with
    // any.
    void count(const RankExperts& rank, std::vector<std::int32_t>& common,
               std::vector<std::int32_t>& met) const {
        each_run(rank, [&](std::int32_t expert, std::int32_t copies) {
            const auto [first, last] =
                std::equal_range(holders_.begin(), holders_.end(), Holder{expert, 0, 0});
            for (auto holder = first; holder != last; ++holder) {
                if (common[holder->rank] == 0) met.push_back(holder->rank);
                common[holder->rank] += std::min(copies, holder->copies);
            }
        });
    }

    template <typename Visit>
    static void each_run(const RankExperts& rank, Visit visit) {
        for (auto at = rank.begin(); at != rank.end();) {
            const auto end = std::upper_bound(at, rank.end(), *at);
            visit(*at, static_cast<std::int32_t>(end - at));
            at = end;
        }
    }

    std::vector<Holder> holders_;
    std::vector<std::vector<RankPair>> by_common_;
};

// Returns for each proposed rank the installed rank that takes its experts.
Labels match_ranks(const std::vector<RankExperts>& proposed,
                   const std::vector<RankExperts>& installed) {
    const std::size_t ranks = proposed.size();
    Labels label(ranks, -1);
    std::vector<bool> taken(ranks, false);
    std::int64_t matched = 0, kept = 0;
    Overlaps(proposed, installed).each([&](const RankPair& pair, std::int64_t common) {
        if (pair.proposed == pair.installed) kept += common;
        if (label[pair.proposed] >= 0 || taken[pair.installed]) return;
        label[pair.proposed] = pair.installed;
        taken[pair.installed] = true;
        matched += common;
    });
    if (matched < kept) {
        std::iota(label.begin(), label.end(), 0);
        return label;
    }
    // Ranks with nothing in common take what is left, in order.
    std::size_t next = 0;
    for (std::int64_t& rank : label) {
        if (rank >= 0) continue;
        while (taken[next]) ++next;
        rank = static_cast<std::int64_t>(next++);
    }
    return label;
}

void fill_rank(Span<const std::int32_t> installed, RankExperts experts, std::int32_t* aligned) {
    constexpr std::int32_t kFree = -1;
    for (std::size_t s = 0; s < installed.size; ++s) {
        const auto at = std::lower_bound(experts.begin(), experts.end(), installed[s]);
        const bool keeps = at != experts.end() && *at == installed[s];
        aligned[s] = keeps ? installed[s] : kFree;
        if (keeps) experts.erase(at);
    }
    auto next = experts.begin();
    for (std::size_t s = 0; s < installed.size; ++s)
        if (aligned[s] == kFree) aligned[s] = *next++;
}

}  // namespace

void align_slots(Ids installed, Ids proposed, std::int64_t ranks, Span<std::int32_t> aligned) {
    const std::vector<RankExperts> wanted = sorted_ranks(proposed, ranks);
    const Labels label = match_ranks(wanted, sorted_ranks(installed, ranks));
    const std::size_t per_rank = installed.size / ranks;
    for (std::int64_t p = 0; p < ranks; ++p) {
        const std::size_t offset = label[p] * per_rank;
        fill_rank({installed.data + offset, per_rank}, wanted[p], aligned.data + offset);
    }
}

std::int64_t count_moves(Ids installed, Ids proposed, std::int64_t ranks) {
    const std::vector<RankExperts> before = sorted_ranks(installed, ranks);
    const std::vector<RankExperts> after = sorted_ranks(proposed, ranks);
    auto moves = static_cast<std::int64_t>(proposed.size);
    for (std::int64_t r = 0; r < ranks; ++r) moves -= count_common(before[r], after[r]);
    return moves;
}

}  // namespace equipoise
