#include "labels.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

namespace equipoise {
namespace {

using Rank = std::vector<std::int32_t>;  // the experts of one rank, ascending
using Labels = std::vector<std::int64_t>;

std::vector<Rank> sorted_ranks(Ids placement, std::int64_t ranks) {
    const std::size_t per_rank = placement.size / ranks;
    std::vector<Rank> sorted;
    sorted.reserve(ranks);
    for (std::int64_t r = 0; r < ranks; ++r) {
        const std::int32_t* first = placement.data + r * per_rank;
        sorted.emplace_back(first, first + per_rank);
        std::sort(sorted.back().begin(), sorted.back().end());
    }
    return sorted;
}

std::int64_t overlap(const Rank& a, const Rank& b) {
    std::int64_t common = 0;
    for (auto x = a.begin(), y = b.begin(); x != a.end() && y != b.end();) {
        if (*x == *y) ++common;
        const bool step_x = *x <= *y, step_y = *y <= *x;
        x += step_x;
        y += step_y;
    }
    return common;
}

struct Pair {
    std::int64_t common;
    std::int64_t proposed;
    std::int64_t installed;

    bool operator<(const Pair& other) const {
        return std::tuple(-common, proposed, installed) <
               std::tuple(-other.common, other.proposed, other.installed);
    }
};

std::vector<Pair> rank_pairs(const std::vector<Rank>& proposed,
                             const std::vector<Rank>& installed) {
    const auto ranks = static_cast<std::int64_t>(proposed.size());
    std::vector<Pair> pairs;
    pairs.reserve(ranks * ranks);
    for (std::int64_t p = 0; p < ranks; ++p)
        for (std::int64_t q = 0; q < ranks; ++q)
            pairs.push_back({overlap(proposed[p], installed[q]), p, q});
    std::sort(pairs.begin(), pairs.end());
    return pairs;
}

// label[p]: the installed rank that takes what the plan proposed for rank p.
Labels match_ranks(const std::vector<Rank>& proposed, const std::vector<Rank>& installed) {
    const std::size_t ranks = proposed.size();
    Labels label(ranks, -1);
    std::vector<bool> taken(ranks, false);
    std::int64_t matched = 0, kept = 0;
    for (const Pair& pair : rank_pairs(proposed, installed)) {
        if (pair.proposed == pair.installed) kept += pair.common;
        if (label[pair.proposed] >= 0 || taken[pair.installed]) continue;
        label[pair.proposed] = pair.installed;
        taken[pair.installed] = true;
        matched += pair.common;
    }
    if (matched < kept) std::iota(label.begin(), label.end(), 0);
    return label;
}

void fill_rank(Span<const std::int32_t> installed, Rank experts, std::int32_t* aligned) {
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

void align(Ids installed, Ids proposed, std::int64_t ranks, Span<std::int32_t> aligned) {
    const std::vector<Rank> wanted = sorted_ranks(proposed, ranks);
    const Labels label = match_ranks(wanted, sorted_ranks(installed, ranks));
    const std::size_t per_rank = installed.size / ranks;
    for (std::int64_t p = 0; p < ranks; ++p) {
        const std::size_t offset = label[p] * per_rank;
        fill_rank({installed.data + offset, per_rank}, wanted[p], aligned.data + offset);
    }
}

std::int64_t count_moves(Ids installed, Ids proposed, std::int64_t ranks) {
    const std::vector<Rank> before = sorted_ranks(installed, ranks);
    const std::vector<Rank> after = sorted_ranks(proposed, ranks);
    auto moves = static_cast<std::int64_t>(proposed.size);
    for (std::int64_t r = 0; r < ranks; ++r) moves -= overlap(before[r], after[r]);
    return moves;
}

}  // namespace equipoise
